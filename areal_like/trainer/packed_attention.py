"""Causal attention over a pack of sequences on a CPU: those of similar length are padded and share one call."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class SequenceGroup:
    """Some sequences of one pack as a padded batch, n of them, at most L tokens each (L / cp of them this rank's).

    `queries` `[n, L / cp]` and `keys` `[n, L]` are places in this rank's pack and in all ranks' packs concatenated;
    padding repeats a place. `real` marks queries that are not padding; `mask` `[n, 1, L / cp, L]` is None for plain
    causal attention.
    """

    queries: Tensor
    keys: Tensor
    real: Tensor
    mask: Tensor | None


def padded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: Sequence[SequenceGroup],
    scale: float | None,
    window: int | None = None,
) -> Tensor:
    """`query` `[t, heads, dim]` of this rank, `key` and `value` `[t of all ranks, heads, dim]`; as `query`.

    A `window` is of the tokens that a query attends to; it is for groups whose sequences are whole on this rank.
    """
    outputs, places = [], []
    for group in groups:
        q, k, v = (
            t.index_select(0, at.flatten()).view(*at.shape, *t.shape[1:]).transpose(1, 2)
            for t, at in ((query, group.queries), (key, group.keys), (value, group.keys))
        )
        mask = group.mask if window is None else _sliding(q.shape[2], window)
        o = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(o.transpose(1, 2)[group.real])
        places.append(group.queries[group.real])
    output = torch.cat(outputs)
    order = torch.empty(len(output), dtype=torch.long)
    order[torch.cat(places)] = torch.arange(len(output))
    return output.index_select(0, order)


def _sliding(length: int, window: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window)


def group_by_length(cu_seqlens: Tensor, cp: int = 1, cp_rank: int = 0) -> list[SequenceGroup]:
    """The sequences between `cu_seqlens` `[sequences + 1]`, within a factor of two in length."""
    kind = torch.ceil(torch.log2(cu_seqlens.diff().float())).int()
    return [_group(cu_seqlens, torch.nonzero(kind == k).flatten(), cp, cp_rank) for k in kind.unique()]


def _group(cu_seqlens: Tensor, members: Tensor, cp: int, cp_rank: int) -> SequenceGroup:
    starts, lengths = cu_seqlens[:-1][members].long(), cu_seqlens.diff()[members].long()
    longest, local_total = int(lengths.max()), int(cu_seqlens[-1]) // cp
    chunk = (lengths // (2 * cp))[:, None]

    def places(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of a rank's tokens: place in its pack, position in their sequence, whether they are not padding."""
        at = torch.arange(longest // cp)[None]
        real = at < lengths[:, None] // cp
        at = torch.where(real, at, 0)
        position = at if cp == 1 else at + torch.where(at < chunk, rank, 2 * cp - 2 - rank) * chunk
        return starts[:, None] // cp + at, position, real

    queries, position, real = places(cp_rank)
    if cp == 1:
        return SequenceGroup(queries, queries, real, None)
    keys, key_position, key_real = (
        torch.cat(column, 1) for column in zip(*(places(rank) for rank in range(cp)), strict=True)
    )
    keys = keys + torch.arange(cp).repeat_interleave(longest // cp) * local_total
    mask = (position[:, :, None] >= key_position[:, None, :]) & key_real[:, None, :]
    return SequenceGroup(queries, keys, real, mask[:, None])
