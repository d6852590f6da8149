"""Products of all experts of a layer in one kernel each, by torch's `grouped_mm`.

Transformer Engine launches one kernel per expert and product, and Megatron's data parallelism one per expert and
gradient. With many experts the host then needs longer than the GPU. Here a layer's weights are stacked first, which
costs a copy, and their gradients are added to `weight.main_grad`, the buffer of Megatron's data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from types import MethodType
from typing import Any

import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor
from torch.nn.functional import grouped_mm

_ROW = 16  # bytes: rows of a matrix have a multiple of them
_HOPPER = 9  # GPUs before it have no such kernel


def group_products(models: Iterable[torch.nn.Module], *, sends_early: bool) -> int:
    """Make experts compute with grouped products where these support them; return the number of layers that do.

    `sends_early`: gradients are sent while others are computed, so Megatron's hook needs a gradient of every weight.
    """
    layers = [
        layer
        for model in models
        for experts in model.modules()
        if isinstance(experts, TEGroupedMLP) and _supports(experts.config)
        for layer in (experts.linear_fc1, experts.linear_fc2)
        if all(side * layer.weight0.element_size() % _ROW == 0 for side in layer.weight0.shape)
    ]
    for layer in layers:
        layer.forward = MethodType(_forward_early if sends_early else _forward, layer)
    return len(layers)


def _supports(config: Any) -> bool:
    plain = not (config.add_bias_linear or config.fp8 or config.fp4 or config.use_transformer_engine_op_fuser)
    delayed = config.delay_wgrad_compute or config.overlap_dispatch_backward_with_experts_wgrad
    if not torch.cuda.is_available():
        return plain and not delayed
    capable = torch.cuda.get_device_capability()[0] >= _HOPPER
    return plain and not delayed and capable and config.params_dtype == torch.bfloat16


def _forward(self: Any, x: Tensor, m_splits: list[int], *, every: bool = False) -> tuple[Tensor, None]:
    """Compute `x` `[tokens, in]`, sorted by expert, `m_splits[i]` tokens for expert i."""
    weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
    if not len(x):  # the kernels need rows, and gradients their shapes
        return x @ weights[0].t() + sum(0 * weight.sum() for weight in weights), None
    ends = torch.tensor(list(accumulate(m_splits)), dtype=torch.int32).to(x.device, non_blocking=True)
    told = weights if every else weights[:1]  # the weights whose hooks run
    output: Tensor = _Products.apply(x, ends, weights, *told)
    return output, None


def _forward_early(self: Any, x: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
    return _forward(self, x, m_splits, every=True)


class _Products(torch.autograd.Function):
    """Rows of each expert times its weight; `told` are the weights that autograd sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, weights: list[Tensor], *told: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends)
        ctx.weights, ctx.told = weights, len(told)
        return grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, ends), weights = ctx.saved_tensors, ctx.weights
        grad = grad.contiguous()
        of_x = grouped_mm(grad, torch.stack(weights), offs=ends) if ctx.needs_input_grad[0] else None
        if not weights[0].requires_grad:
            return of_x, None, None, *[None] * ctx.told
        of_weights = grouped_mm(grad.t(), x, offs=ends).unbind()
        torch._foreach_add_([weight.main_grad for weight in weights], of_weights)
        if ctx.told == 1:
            return of_x, None, None, None
        for weight in weights:
            weight.grad_added_to_main_grad = True  # Megatron's hook adds the gradient otherwise
        unread = torch.empty_like(weights[0])
        return of_x, None, None, *(unread.detach() for _ in weights)
