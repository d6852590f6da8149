"""Packed causal attention for transformers' models, under the name `packed`.

A model is given one row of tokens and `cu_seq_lens_q`, as for flash attention (transformers' FlashAttentionKwargs).
On GPUs torch's own variable-length kernel computes it, on a CPU padded groups.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from areal_like.trainer.packed_attention import SequenceGroup, group_by_length, padded_attention

NAME = "packed"


def register() -> None:
    """Make `attn_implementation="packed"` known to transformers; it needs no mask."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    groups: list[SequenceGroup],
    **_: Any,
) -> tuple[Tensor, None]:
    """Of `query`, `key`, `value` `[1, heads, t, dim]` `[1, t, heads, dim]`; a transformers attention function."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if query.device.type == "cpu":
        return padded_attention(q, k, v, groups, scaling)[None], None
    from torch.nn.attention.varlen import varlen_attn

    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    ends, longest = cu_seq_lens_q, max_length_q
    output = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0))
    return output[None], None


def arguments(cu_seqlens: Tensor, longest: int) -> dict[str, Any]:
    """What a model has to be called with beside its tokens and positions."""
    groups = group_by_length(cu_seqlens) if cu_seqlens.device.type == "cpu" else []
    return {"cu_seq_lens_q": cu_seqlens, "max_length_q": longest, "groups": groups}
