"""Adapters (LoRA) in transformers' model: two parameters of each linear layer that is adapted, and a forward hook."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from areal_like.trainer.engine import LoRA
from areal_like.trainer.fsdp.checkpoint_names import has_tower, tower_parts
from areal_like.trainer.fsdp.tensor_parallel import local
from areal_like.trainer.lora import Adapter, initial_adapter, refuse_unmatched

__all__ = ["MATRICES", "Adapter", "adapted_layers", "attach", "whole_adapter"]

MATRICES = ("lora_A", "lora_B")


def attach(model: PreTrainedModel, lora: LoRA, seed: int) -> None:
    """Add new float32 adapters to a model that is not sharded yet; only they are trainable from then on."""
    model.requires_grad_(False)
    others = {model.get_output_embeddings()}
    if has_tower(model):
        others |= {layer for part in tower_parts(model) for layer in part.modules()}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and layer not in others and lora.adapts(name):
            whole = initial_adapter(lora, seed, name, layer.in_features, layer.out_features)
            for matrix, values in zip(MATRICES, whole, strict=True):
                layer.register_parameter(matrix, torch.nn.Parameter(values))
            layer.paused = False
            layer.register_forward_hook(partial(_add, lora.scale))
    refuse_unmatched(lora, adapted_layers(model))


def _add(scale: float, layer: torch.nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    if layer.paused:
        return output
    return output + F.linear(F.linear(inputs[0], local(layer.lora_A)), local(layer.lora_B)) * scale


def adapted_layers(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Return the layers with adapters, by name."""
    return {name: layer for name, layer in model.named_modules() if hasattr(layer, MATRICES[0])}


def whole_adapter(layer: torch.nn.Module) -> Adapter:
    """Gather an adapter from all ranks, which all call this."""
    parts: list[DTensor] = [getattr(layer, matrix).detach() for matrix in MATRICES]
    return Adapter(*(part.to(part.device_mesh.device_type).full_tensor() for part in parts))
