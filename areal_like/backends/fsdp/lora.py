"""Adapters (LoRA) in transformers' model: two parameters of each linear layer that is adapted, and a forward hook."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from areal_like.backends.fsdp.checkpoint_names import has_tower, in_checkpoint, tower_parts
from areal_like.backends.fsdp.tensor_parallel import local
from areal_like.backends.training.lora import Adapter, initial_adapter, refuse_unmatched
from areal_like.core.config.schema import ALL_LINEAR
from areal_like.core.trainer.engine import LoRA

# Adapters (LoRA) of experts in transformers' models: one for each of the three matrices of each expert.
#
# transformers packs the matrices of all experts, gate and up in one tensor. Experts compute with merged weights, so
# transformers' implementations of grouped products need no change.

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


__all__ = ["MATRICES", "Adapter", "adapted_layers", "adapters_in_files", "attach", "merge"]

MATRICES = ("lora_A", "lora_B")


def attach(model: PreTrainedModel, lora: LoRA, seed: int) -> None:
    """Add new float32 adapters to a model that is not sharded yet; only they are trainable from then on."""
    model.requires_grad_(False)
    others = {model.get_output_embeddings()}
    if ALL_LINEAR in lora.targets:
        others |= {*routers(model)}
    if has_tower(model):
        others |= {layer for part in tower_parts(model) for layer in part.modules()}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and layer not in others and lora.adapts(name):
            whole = initial_adapter(lora, seed, name, layer.in_features, layer.out_features)
            for matrix, values in zip(MATRICES, whole, strict=True):
                layer.register_parameter(matrix, torch.nn.Parameter(values))
            layer.paused = False
            layer.register_forward_hook(partial(_add, lora.scale))
    attach_to_experts(model, lora, seed)
    refuse_unmatched(lora, adapted_layers(model))


def _add(scale: float, layer: torch.nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    if layer.paused:
        return output
    return output + F.linear(F.linear(inputs[0], local(layer.lora_A)), local(layer.lora_B)) * scale


def adapted_layers(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Return the layers with adapters, by name; a matrix of all experts is one."""
    return {name: layer for name, layer in model.named_modules() if hasattr(layer, MATRICES[0])}


def merge(
    model: PreTrainedModel, adapted: Mapping[str, torch.nn.Module], name: str, weight: Tensor, scale: float
) -> dict[str, Tensor]:
    """Return a whole tensor of the model with its adapters, as the tensors that a checkpoint has for it, by name.

    All ranks gather the adapters together.
    """
    layer, _, kind = name.rpartition(".")
    if kind == "weight" and layer in adapted:
        weight = _whole_adapter(adapted[layer]).merge(weight, scale)
    stored = in_checkpoint(model, name, weight)
    for packed in packed_layers(name):
        if packed in adapted:
            for each, adapter in _in_files(packed, adapted[packed]):
                stored[f"{each}.weight"] = adapter.merge(stored[f"{each}.weight"], scale)
    return stored


def adapters_in_files(model: PreTrainedModel) -> Iterator[tuple[str, Adapter]]:
    """Yield each adapter whole, by the name of its layer in a checkpoint; all ranks gather them together."""
    for name, layer in adapted_layers(model).items():
        yield from _in_files(name, layer)


def _in_files(name: str, layer: torch.nn.Module) -> Iterator[tuple[str, Adapter]]:
    whole = _whole_adapter(layer)
    if isinstance(layer, ExpertAdapters):
        yield from zip(layer.layers, map(Adapter, whole.a, whole.b), strict=True)
    else:
        yield name, whole


def _whole_adapter(layer: torch.nn.Module) -> Adapter:
    """Gather an adapter, or all experts' adapters, from all ranks, which all call this."""
    parts: list[DTensor] = [getattr(layer, matrix).detach() for matrix in MATRICES]
    return Adapter(*(part.to(part.device_mesh.device_type).full_tensor() for part in parts))
