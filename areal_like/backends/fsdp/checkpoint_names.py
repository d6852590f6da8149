"""Tensors of transformers' model under their names in a checkpoint, where experts have tensors of their own."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer

LANGUAGE = "language_model"  # the part of a model behind its tower
# Families whose published checkpoints have the matrices of experts transposed, as SGLang reads them
TRANSPOSED = frozenset({"qwen3_vl_moe"})
_SIGLIP = re.compile(r"^vision_tower\.(?!vision_model\.)")  # transformers 5 leaves a name out, SGLang needs it
PACKED_EXPERTS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


def kept_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, then the buffers that a checkpoint contains, such as the bias of DeepSeek's router."""
    yield from model.named_parameters()
    stored = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in stored)


def in_checkpoint(model: PreTrainedModel, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return a whole tensor of the model as the tensors that a checkpoint has for it, by name; they share memory."""
    if model.config.model_type in TRANSPOSED and name.endswith(PACKED_EXPERTS):  # transformers would save it as it is
        return {name: tensor.transpose(1, 2)}
    stored = revert_weight_conversion(model, {name: tensor})
    if model.config.model_type != "gemma3":
        return stored
    return {_SIGLIP.sub("vision_tower.vision_model.", key): part for key, part in stored.items()}


def auto_class(config: object) -> Any:
    """Return transformers' class that builds a config's model: of text and images where the config has a tower."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def empty_model(config: object) -> PreTrainedModel:
    """Return the language model of a transformers config without memory for its weights."""
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(config)
    return model


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Return the decoder's layers, whose name differs between families."""
    decoder = getattr(model.base_model, "language_model", model.base_model)
    lists = [part for part in decoder.modules() if isinstance(part, torch.nn.ModuleList)]
    layers = model.config.get_text_config().num_hidden_layers
    return next((part for part in lists if len(part) == layers), torch.nn.ModuleList())


def head_name(model: PreTrainedModel) -> str | None:
    """Return the name of the output layer's weight, which differs between families; None without one."""
    head = model.get_output_embeddings()
    found = (name for name, module in model.named_modules() if head is not None and module is head)
    return next((f"{name}.weight" for name in found), None)


def has_tower(model: PreTrainedModel) -> bool:
    """Return whether a model takes images."""
    return hasattr(model.base_model, "get_image_features")


def tower_parts(model: PreTrainedModel) -> Iterator[torch.nn.Module]:
    """Yield the parts of a model before its language model: the tower, and the projection of its output."""
    yield from (part for name, part in model.base_model.named_children() if name != LANGUAGE)


def tower_layers(model: PreTrainedModel) -> Iterator[torch.nn.Module]:
    """Yield the layers of a model's tower; none for a model of text alone."""
    if has_tower(model):
        for part in tower_parts(model):
            yield from (layer for layer in part.modules() if isinstance(layer, GradientCheckpointingLayer))
