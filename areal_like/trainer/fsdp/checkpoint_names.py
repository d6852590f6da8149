"""Tensors of transformers' model under their names in a checkpoint, where experts have tensors of their own."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def kept_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, then the buffers that a checkpoint contains, such as the bias of DeepSeek's router."""
    yield from model.named_parameters()
    stored = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in stored)


def in_checkpoint(model: PreTrainedModel, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return a whole tensor of the model as the tensors that a checkpoint has for it, by name; they share memory."""
    return revert_weight_conversion(model, {name: tensor})


def empty_model(config: object) -> PreTrainedModel:
    """Return the language model of a transformers config without memory for its weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Return the decoder's layers, whose name differs between families."""
    lists = [part for part in model.base_model.modules() if isinstance(part, torch.nn.ModuleList)]
    return next((part for part in lists if len(part) == model.config.num_hidden_layers), torch.nn.ModuleList())


def head_name(model: PreTrainedModel) -> str | None:
    """Return the name of the output layer's weight, which differs between families; None without one."""
    head = model.get_output_embeddings()
    found = (name for name, module in model.named_modules() if head is not None and module is head)
    return next((f"{name}.weight" for name in found), None)
