"""Heads of sequence classifiers without a bias, as in transformers.

SGLang 0.5.17 gives some of them one, and draws it at random where the checkpoint has none.
"""

from importlib import import_module
from typing import Any

from areal_like.rollout.sglang.architectures import CLASSES_WITH_BIAS
from areal_like.rollout.sglang.patch import Launch, Patch


def leave_out_biases(launch: Launch) -> None:
    """Set the bias of every classifier's head to zero."""
    if launch.server.is_embedding:
        for module, name in CLASSES_WITH_BIAS.items():
            _without_made_up_bias(getattr(import_module(f"sglang.srt.models.{module}"), name))


def _without_made_up_bias(model: Any) -> None:
    import torch

    make = model.__init__

    def make_without(self: Any, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        torch.nn.init.zeros_(self.score.bias)

    model.__init__ = make_without


PATCH = Patch(schedule=leave_out_biases)
