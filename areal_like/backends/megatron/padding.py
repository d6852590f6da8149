"""Excludes padding from routers' statistics: auxiliary losses and the load that updates their biases.

Megatron-core 0.19 has a mask for that. This module makes it exact if tensor and context ranks hold different numbers of
real tokens, finite if a micro-batch has none, and gives it the right shape for the biases.
"""

from typing import Any

import torch
from megatron.core.transformer.moe import router
from megatron.core.transformer.moe.moe_utils import get_tokens_per_expert_and_token_count
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor

_apply_expert_bias = TopKRouter._apply_expert_bias


def router_padding(padding: Tensor, model: torch.nn.Module) -> Tensor | None:
    """Return the mask `[1, t]` for a pipeline stage, True at padding; None for a model without experts.

    The first stage splits the mask for sequence parallelism; the other stages need it already split.
    """
    config = get_model_config(model)
    if not config.num_moe_experts:
        return None
    if not config.sequence_parallel or get_attr_wrapped_model(model, "pre_process"):
        return padding
    group = get_attr_wrapped_model(model, "pg_collection").tp
    return padding.chunk(group.size(), dim=1)[group.rank()].contiguous()


def ignore_padding() -> None:
    """Make Megatron's routers apply the mask."""
    router.get_tokens_per_expert_and_token_count = _count_tokens
    TopKRouter._apply_expert_bias = _move_bias


def _count_tokens(
    routing_map: Tensor, reduce_group: Any, topk: int, with_padding_mask: bool = False
) -> tuple[Tensor, Tensor | int, Tensor | int]:
    """Count tokens per expert, of this rank and of all ranks; with a mask, the rank's count is the mean of the group.

    Megatron multiplies the loss by the rank's count, so only the mean gives every rank's share the same weight.
    """
    per_expert, local, total = get_tokens_per_expert_and_token_count(routing_map, reduce_group, topk, with_padding_mask)
    if with_padding_mask:
        total = total.clamp(min=1)
        local = total / reduce_group.size()
    return per_expert, local, total


def _move_bias(self: TopKRouter, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
    _apply_expert_bias(self, routing_map if padding_mask is None else routing_map & ~padding_mask[:, None])
