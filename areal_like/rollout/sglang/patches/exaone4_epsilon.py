"""Norms of exaone4's queries and keys: SGLang 0.5.17 takes 1e-6 instead of the epsilon in the config."""

from typing import Any

from areal_like.rollout.sglang.patch import Launch, Patch


def read_epsilon() -> None:
    """Normalise exaone4's queries and keys with the epsilon of its config: SGLang takes 1e-6."""
    from sglang.srt.models.exaone4 import Exaone4Attention

    build = Exaone4Attention.__init__

    def build_as_configured(self: Any, config: Any, **named: Any) -> None:
        build(self, config, **{"rms_norm_eps": config.rms_norm_eps, **named})

    Exaone4Attention.__init__ = build_as_configured


def apply(launch: Launch) -> None:
    """Correct the model where it is the served one."""
    if "Exaone4ForCausalLM" in launch.architectures:
        read_epsilon()


PATCH = Patch(schedule=apply)
