"""Vision towers of gemma3: SGLang 0.5.17 computes a coarser GELU for all instead of the one in their config."""

from typing import Any

from areal_like.rollout.sglang.patch import Launch, Patch


def activate_towers_as_configured() -> None:
    """Use the activation in the config of gemma3's vision tower: SGLang computes a coarser GELU for all."""
    from sglang.srt.models import siglip
    from transformers.activations import ACT2FN

    build = siglip.SiglipMLP.__init__

    def build_as_configured(self: Any, config: Any, *arguments: Any, **named: Any) -> None:
        build(self, config, *arguments, **named)
        self.act = ACT2FN[config.hidden_act]

    siglip.SiglipMLP.__init__ = build_as_configured


def apply(launch: Launch) -> None:
    """Correct the model where it is the served one."""
    if "Gemma3ForConditionalGeneration" in launch.architectures:
        activate_towers_as_configured()


PATCH = Patch(schedule=apply)
