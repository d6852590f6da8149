"""The interface of a bridge to the engine, and the inputs of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # the checks before a run read `support` without torch
    import torch
    from torch import Tensor

    from allocation.plan import ParallelSizes
    from areal_like.backends.megatron.bridges.config import ModelConfig


# Megatron clips gradients of a detached layer by a norm of its own
_MTP: dict[str, Any] = {"mtp_num_layers": 1, "mtp_detach_heads": True}


class Bridge(Protocol):
    """Interface between the engine and a bridge. A model is a list of chunks, several with a virtual pipeline."""

    def build(self) -> list[torch.nn.Module]:
        """Build this rank's GPTModel chunks in the engine's data type, on its device, neither wrapped nor loaded."""

    def load(self, models: list[torch.nn.Module], path: Path) -> None:
        """Copy the weights of a Hugging Face checkpoint, of the shape that was built, into `models`."""

    def export(self, models: list[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight under its Hugging Face name, each once, whole and without vocabulary padding.

        A collective: all ranks iterate together, and all see the same names; rank 0's tensors count.
        """


@dataclass(frozen=True)
class ModelSource:
    """Input of a bridge: a checkpoint directory in Hugging Face form, a data type, a layout, more config fields.

    `value_head` is whether the model is a critic; `seed` initialises a new value head. `mtp` is whether the model has a
    layer for multi-token prediction.
    """

    path: Path
    dtype: torch.dtype
    sizes: ParallelSizes
    settings: Mapping[str, Any]
    value_head: bool = False
    seed: int = 0
    mtp: bool = False

    @cached_property
    def config(self) -> ModelConfig:
        """The model's config, as far as `make_bridge` lets it pass."""
        from areal_like.backends.megatron.bridges.config import read_config

        config = read_config(self.path)
        if self.value_head:  # with a tied output layer, which goes, a bridge reads no weights for it
            config.for_bridge.tie_word_embeddings = True
        return config

    @property
    def options(self) -> dict[str, Any]:
        """Fields of TransformerConfig that the bridge is to set; of the model's, `fixed` come before any setting."""
        of_mtp = _MTP if self.mtp else {}
        return {**self.config.options, **self.settings, **self.config.fixed, **of_mtp}
