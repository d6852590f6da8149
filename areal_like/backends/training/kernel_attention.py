"""Packed causal attention by torch's variable-length kernel for GPUs, with sinks, which the kernel does not have."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor


def kernel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float | None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with `query` `[t, heads, dim]`, `key` and `value` of t or more tokens, as `padded_attention` does.

    `ends` and `longest` are where pieces end and the longest of them, of queries and of keys.
    """
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    repeats, size = query.shape[1] // key.shape[1], value.shape[2]
    value = F.pad(value, (0, query.shape[2] - size))  # DeepSeek's values are smaller than its keys
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    scale = query.shape[2] ** -0.5 if scale is None else scale
    before = -1 if window is None else window - 1
    attend = partial(varlen_attn, scale=scale, window_size=(before, 0))
    pieces = (*ends, *longest)
    if sinks is None:
        return attend(query, key, value, *pieces)[..., :size]
    output, total = attend(query, key, value, *pieces, return_aux=AuxRequest(lse=True))
    # The kernel gives the logarithm of a query's summed scores no gradient; `scores` has the same one.
    scores = scale * (query * attend(query.detach(), key.detach(), key, *pieces)).sum(2, dtype=torch.float32)
    total = total.transpose(0, 1) + scores - scores.detach()
    return (output * torch.sigmoid(total - sinks).unsqueeze(2).to(output.dtype))[..., :size]
