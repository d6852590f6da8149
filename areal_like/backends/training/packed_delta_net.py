"""Gated delta nets over a pack of sequences in plain torch, with a separate state and convolution per sequence.

A replacement for flash-linear-attention and causal-conv1d with `cu_seqlens` and `seq_idx`, if they are not installed.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_like.backends.training.packed_attention import group_by_length

# (query, key, value, g=, beta=, ...) of whole sequences, each `[n, L, heads, …]`, to outputs and a state
DeltaRule = Callable[..., tuple[Tensor, Tensor | None]]


def sequence_numbers(cu_seqlens: Tensor) -> Tensor:
    """Return the number of each token's sequence, `[t]`, from `cu_seqlens` `[sequences + 1]`."""
    lengths = cu_seqlens.diff().long()
    return torch.arange(len(lengths), device=lengths.device, dtype=torch.int32).repeat_interleave(lengths)


def causal_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, numbers: Tensor | None) -> Tensor:
    """Convolve each channel over the last tokens of its own sequence, and apply SiLU; `[1, channels, t]` as `x`.

    `weight` is `[channels, tokens]`, with the token itself in the last column; `numbers` `[t]` distinguish sequences.
    """
    kernel, length = weight.shape[1], x.shape[2]
    output = x * weight[:, -1:]
    for back in range(1, min(kernel, length)):
        earlier = F.pad(x, (back, 0))[..., :length] * weight[:, kernel - 1 - back, None]
        if numbers is not None:
            same = F.pad(numbers[back:] == numbers[:-back], (back, 0))
            earlier = earlier.masked_fill(~same, 0)
        output = output + earlier
    return F.silu(output if bias is None else output + bias[:, None])


def packed_delta_rule(
    rule: DeltaRule, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **how: Any
) -> Tensor:
    """Apply `rule` to each sequence of a pack, batched by similar length; `[1, t, heads, dim]` as `value`.

    Padding follows a sequence's tokens, so it does not affect the kept outputs.
    """
    output = torch.empty_like(value[0])
    for group in group_by_length(cu_seqlens, cu_seqlens):
        parts = (x[0][group.queries] for x in (query, key, value))
        computed, _ = rule(*parts, g=g[0][group.queries], beta=beta[0][group.queries], **how)
        output = output.index_put((group.queries[group.real],), computed[group.real].to(output.dtype))
    return output[None]
