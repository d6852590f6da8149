"""Libraries that convert between Hugging Face and Megatron, behind one protocol; each is imported only when chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from areal_like.trainer.megatron.options import check_bridge

if TYPE_CHECKING:
    from allocation import ParallelSizes


class Bridge(Protocol):
    """What the engine knows of a bridge. A model is a list of chunks, several with a virtual pipeline."""

    def build(self) -> list[torch.nn.Module]:
        """This rank's GPTModel chunks in the engine's data type, on its device, neither wrapped nor loaded."""

    def load(self, models: list[torch.nn.Module]) -> None:
        """Copies the Hugging Face checkpoint into `models`."""

    def export(self, models: list[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, each once, whole and without vocabulary padding.

        A collective: all ranks iterate together, and all see the same names; rank 0's tensors count.
        """


@dataclass(frozen=True)
class ModelSource:
    """What a bridge builds: a checkpoint directory in Hugging Face form, a data type, a layout, more config fields."""

    path: Path
    dtype: torch.dtype
    sizes: ParallelSizes
    options: dict[str, Any]

    def hf_config(self) -> PretrainedConfig:
        """The model's config, with `rope_theta` where transformers 4 had it.

        transformers 5 keeps it in `rope_parameters`; mbridge raises then, and others fall back to base 10,000.
        """
        config = AutoConfig.from_pretrained(self.path)
        if getattr(config, "rope_theta", None) is None:
            config.rope_theta = config.rope_parameters["rope_theta"]
        return config


def make_bridge(bridge_type: str, source: ModelSource) -> Bridge:
    """The bridge named by `actor.megatron.bridge_type`.

    Raises ValueError for an unknown name, or a layout that the bridge cannot serve, and ModuleNotFoundError when its
    library is not installed.
    """
    experts = any(getattr(source.hf_config(), name, None) for name in ("num_experts", "n_routed_experts"))
    if problem := check_bridge(bridge_type, source.sizes, experts=experts):
        raise ValueError(problem)
    match bridge_type:
        case "mbridge":
            from areal_like.trainer.megatron.bridges.mbridge import MBridge

            return MBridge(source)
        case "megatron-bridge":
            from areal_like.trainer.megatron.bridges.megatron_bridge import MegatronBridge

            return MegatronBridge(source)
    raise ValueError(f"actor.megatron.bridge_type is mbridge or megatron-bridge, not {bridge_type!r}")
