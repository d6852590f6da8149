"""transformers' gated delta nets over a pack, where flash-linear-attention and causal-conv1d are not installed."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from areal_like.backends.training.packed_delta_net import DeltaRule, causal_convolution, packed_delta_rule


def pack_delta_nets(model: torch.nn.Module) -> None:
    """Reset transformers' own torch implementations at the start of each sequence of a pack."""
    for module in model.modules():
        rule = getattr(module, "chunk_gated_delta_rule", None)
        if rule is not None and rule.__name__ == "torch_chunk_gated_delta_rule":
            module.chunk_gated_delta_rule = partial(_delta_rule, rule)
        if rule is not None and module.causal_conv1d_fn is None:
            module.causal_conv1d_fn = _convolution


def _delta_rule(
    rule: DeltaRule, query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Any, **how: Any
) -> tuple[Tensor, Tensor | None]:
    if cu_seqlens is None:
        return rule(query, key, value, g=g, beta=beta, **how)
    return packed_delta_rule(rule, query, key, value, g, beta, cu_seqlens, **how), None


def _convolution(
    *, x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, activation: str = "silu"
) -> Tensor:
    return causal_convolution(x, weight, bias, None if seq_idx is None else seq_idx[0])
