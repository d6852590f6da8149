"""Adapters (LoRA) of experts in transformers' models: one for each of the three matrices of each expert.

transformers packs the matrices of all experts, gate and up in one tensor. Experts compute with merged weights, so
transformers' implementations of grouped products need no change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_like.backends.fsdp.checkpoint_names import in_checkpoint
from areal_like.backends.training.lora import Adapter, initial_adapter
from areal_like.core.trainer.engine import LoRA

PACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_NAME = "adapters"  # of an experts module's adapters in its module tree


class ExpertAdapters(torch.nn.Module):
    """Adapters of one matrix of all experts: `lora_A` `[experts, rank, in]` and `lora_B` `[experts, out, rank]`.

    `layers` are the names of each expert's layer in a checkpoint.
    """

    def __init__(self, layers: Sequence[str], adapters: Sequence[Adapter]) -> None:
        super().__init__()
        self.layers = layers
        self.lora_A = torch.nn.Parameter(torch.stack([adapter.a for adapter in adapters]))
        self.lora_B = torch.nn.Parameter(torch.stack([adapter.b for adapter in adapters]))
        self.paused = False

    def merge(self, weight: Tensor, scale: float) -> Tensor:
        """Return a new `[experts, out, in]`: the weight plus the adapters."""
        return torch.baddbmm(weight, self.lora_B, self.lora_A, alpha=scale)


class _WithWeights:
    """Experts with other weights."""

    def __init__(self, experts: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
        self._experts = experts
        vars(self).update(weights)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


def attach_to_experts(model: PreTrainedModel, lora: LoRA, seed: int) -> None:
    """Add new adapters to the experts of all layers."""
    for name, experts in [*model.named_modules()]:
        if not all(isinstance(getattr(experts, packed, None), torch.nn.Parameter) for packed in PACKED):
            continue
        adapters = torch.nn.ModuleDict()
        for packed, parts in PACKED.items():
            count, outputs, inputs = getattr(experts, packed).shape
            layers = _layers_in_checkpoint(model, f"{name}.{packed}", getattr(experts, packed))
            for place, part in enumerate(parts):
                if lora.adapts(part):
                    of_part = layers[place * count : (place + 1) * count]
                    new = [initial_adapter(lora, seed, layer, inputs, outputs // len(parts)) for layer in of_part]
                    adapters[part] = ExpertAdapters(of_part, new)
        if adapters:
            experts.add_module(_NAME, adapters)
            experts.forward = partial(_forward, experts, lora.scale)


def routers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules beside the experts of a layer that are matrices: routers and gates, which have no adapter."""
    for block in model.modules():
        if hasattr(block, "experts"):
            yield from block.children()


def packed_layers(name: str) -> list[str]:
    """Return the names of the layers that may be adapted in a packed tensor of experts; none for other tensors."""
    experts, _, packed = name.rpartition(".")
    return [f"{experts}.{_NAME}.{part}" for part in PACKED.get(packed, ())]


def _layers_in_checkpoint(model: PreTrainedModel, name: str, packed: Tensor) -> list[str]:
    """Return the names of the layers of a packed tensor, all experts' first parts first."""
    shape = torch.empty(packed.shape, device="meta")
    return [stored.removesuffix(".weight") for stored in in_checkpoint(model, name, shape)]


def _forward(experts: torch.nn.Module, scale: float, *inputs: Tensor) -> Tensor:
    weights = {packed: _merge_packed(experts, packed, scale) for packed in PACKED}
    output: Tensor = type(experts).forward(_WithWeights(experts, weights), *inputs)
    return output


def _merge_packed(experts: torch.nn.Module, packed: str, scale: float) -> Tensor:
    """Return a packed tensor with the adapters of its parts; the tensor itself if none is in use."""
    weight: Tensor = getattr(experts, packed)
    own = dict(experts.adapters.items())
    adapters = [own.get(part) for part in PACKED[packed]]
    if all(adapter is None or adapter.paused for adapter in adapters):
        return weight
    parts = zip(weight.chunk(len(adapters), 1), adapters, strict=True)
    merged = [part if adapter is None else adapter.merge(part, scale) for part, adapter in parts]
    return merged[0] if len(merged) == 1 else torch.cat(merged, 1)
