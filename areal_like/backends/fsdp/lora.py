"""Adapters (LoRA) in transformers' model: two parameters of each linear layer that is adapted, and a forward hook."""

from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from areal_like.backends.fsdp.checkpoint_names import has_tower, in_checkpoint, tower_parts
from areal_like.backends.fsdp.experts import ExpertAdapters, attach_to_experts, packed_layers, routers
from areal_like.backends.fsdp.tensor_parallel import local
from areal_like.backends.training.lora import Adapter, initial_adapter, refuse_unmatched
from areal_like.core.config.schema import ALL_LINEAR
from areal_like.core.trainer.engine import LoRA

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
