"""Tensor parallelism: ranks split the matrices of the decoder's layers, as transformers' plan of the family says.

A plan (`base_model_tp_plan` of the model's config) names a style for each linear layer, `colwise` for one whose outputs
are split, `rowwise` for one whose inputs are (Megatron-LM, arXiv 1909.08053). Each split matrix is a DTensor over these
ranks, and FSDP shards its part over the others. Everything else is computed alike on all of these ranks, and
predictions are divided among them (`Grid.part`).
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from areal_like.backends.fsdp.checkpoint_names import decoder_layers
from areal_like.backends.fsdp.support import find_undivided

ROWS = ("rowwise", "rowwise_split_input")
PARTIAL = "replicated_with_grad_allreduce"
_MATRICES = ("lora_A", "lora_B")


def split_matrices(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split the matrices of a model that FSDP has not sharded yet. Raises ValueError where they cannot be split."""
    config = model.config
    heads = (config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads))
    if why := find_undivided(config.model_type, heads, mesh.size()):
        raise ValueError(f"the layout has t{mesh.size()}, which cannot split the matrices of the model: {why}")
    for layer, style in _find_planned(model, config.base_model_tp_plan):
        if style == PARTIAL:
            layer.partial_gradients = frozenset(name for name, _ in layer.named_parameters(recurse=False))
        else:
            _split(layer, style, mesh)
    model.base_model.register_forward_hook(partial(_divide_predictions, mesh.get_group()))


def _find_planned(model: PreTrainedModel, plan: dict[str, str]) -> Iterator[tuple[torch.nn.Module, str]]:
    """Yield the modules that a plan names, with their styles."""
    patterns = {re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in plan.items()}
    for name, module in model.base_model.named_modules():
        yield from ((module, style) for pattern, style in patterns.items() if pattern.fullmatch(name))


def _split(layer: torch.nn.Linear, style: str, mesh: DeviceMesh) -> None:
    """Split a linear layer, and its adapter like it: A of split inputs, B of split outputs."""
    group, by_rows = mesh.get_group(), style in ROWS
    axes = {"weight": 1, "lora_A": 1} if by_rows else {"weight": 0, "bias": 0, "lora_B": 0}
    for name, parameter in list(layer.named_parameters(recurse=False)):
        if name in axes:
            part = distribute_tensor(parameter.data, mesh, [Shard(axes[name])], src_data_rank=None)
            layer.register_parameter(name, torch.nn.Parameter(part, requires_grad=parameter.requires_grad))
    layer.partial_gradients = frozenset(_MATRICES) - axes.keys()
    take, give = _ends(style, group)
    layer.register_forward_pre_hook(lambda _, inputs: (take(inputs[0]), *inputs[1:]))
    layer.forward = lambda x: F.linear(x, local(layer.weight), None if by_rows else local(layer.bias))
    layer.register_forward_hook(lambda _, __, output: give(output))
    if by_rows and layer.bias is not None:  # of the sum
        layer.register_forward_hook(lambda _, __, output: output + layer.bias)


def _ends(style: str, group: dist.ProcessGroup) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return a split layer's transformations of its input and output."""
    total, gather, own = partial(_sum, group), partial(_gather, group), partial(_own, group)
    if style in ROWS:
        take = partial(_exchange, own, gather) if style == "rowwise_split_input" else _same
        return take, partial(_exchange, total, _same)
    give = partial(_exchange, gather, own) if style == "colwise_gather_output" else _same
    return partial(_exchange, _same, total), give


def local(parameter: Tensor | None) -> Tensor | None:
    """Return this rank's part of a parameter that ranks may split, with gradient."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def finish_gradients(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Make the gradients of parameters that are whole on all ranks of `mesh` the same: their sum, or their mean."""
    for module in (module for layer in decoder_layers(model) for module in layer.modules()):
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.grad is not None and parameter.device_mesh.ndim == 1:
                part = parameter.grad.to_local()
                dist.all_reduce(part, group=mesh.get_group())
                if name not in getattr(module, "partial_gradients", ()):
                    part /= mesh.size()


class _Exchange(torch.autograd.Function):
    """Applies one function to a tensor, and another one to its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def _exchange(there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    made: Tensor = _Exchange.apply(x, there, back)
    return made


def _divide_predictions(group: dist.ProcessGroup, _: torch.nn.Module, __: Any, output: Any) -> Any:
    """Average the gradients of the last hidden states, each rank has the gradients of its predictions.

    The loss is scaled by the number of all ranks, so that these gradients cover all predictions.
    """
    mean = lambda grad: _sum(group, grad).div_(group.size())  # noqa: E731
    output.last_hidden_state = _exchange(_same, mean, output.last_hidden_state)
    return output


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _sum(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gather(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, -1)


def _own(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    return x.chunk(group.size(), -1)[group.rank()]
