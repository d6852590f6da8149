"""Causal attention over a pack of sequences in plain torch: sequences of similar length are padded and share one call.

It is used for operations without a CPU kernel, and for soft caps on any device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class SequenceGroup:
    """Some sequences of one pack as a padded batch, n of them, at most L tokens each (L / cp of them this rank's).

    `queries` `[n, L / cp]` and `keys` `[n, L]`, or more keys, are indices into this rank's queries and all keys;
    padding repeats an index. `real` marks queries that are not padding. `back` `[n, 1, L / cp, L]` is the distance in
    tokens from a query back to a key, negative if the key is masked; None for plain causal attention.
    """

    queries: Tensor
    keys: Tensor
    real: Tensor
    back: Tensor | None


def padded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: Sequence[SequenceGroup],
    scale: float | None,
    window: int | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Attend with this rank's `query` `[t, heads, dim]`, `key` and `value` `[keys of all ranks, heads, dim]`.

    `window` is the number of tokens that a query attends to. `sinks` `[heads]` are scores of keys without values. A
    soft `cap` bounds the scores by a hyperbolic tangent.
    """
    outputs, places = [], []
    for group in groups:
        q, k, v = (
            t.index_select(0, at.flatten()).view(*at.shape, *t.shape[1:]).transpose(1, 2)
            for t, at in ((query, group.queries), (key, group.keys), (value, group.keys))
        )
        mask = _mask(group, window)
        if sinks is not None or cap:
            o = _by_scores(q, k, v, mask, scale, sinks, cap)
        else:
            o = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        outputs.append(o.transpose(1, 2)[group.real])
        places.append(group.queries[group.real])
    output = torch.cat(outputs)
    order = torch.empty(len(output), dtype=torch.long, device=output.device)
    order[torch.cat(places)] = torch.arange(len(output), device=output.device)
    return output.index_select(0, order)


def _by_scores(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, sinks: Tensor | None, cap: float | None
) -> Tensor:
    """Compute attention with all of its scores in memory, `[n, heads, L, dim]` as the queries.

    Each head's sink takes a share of the softmax.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    causal = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril() if mask is None else mask
    scores = scores.masked_fill(~causal, -torch.inf)
    if sinks is not None:
        of_sinks = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)
        scores = torch.cat([scores, of_sinks], 3)
    shares = scores.softmax(3, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    return shares[..., : k.shape[2]] @ v


def _mask(group: SequenceGroup, window: int | None) -> Tensor | None:
    if group.back is not None:
        return group.back >= 0 if window is None else (group.back >= 0) & (group.back < window)
    longest = group.queries.shape[1]
    if window is None:
        return None
    return torch.ones(longest, longest, dtype=torch.bool, device=group.queries.device).tril().triu(1 - window)


def group_by_length(cu_seqlens: Tensor, of_keys: Tensor, cp: int = 1, cp_rank: int = 0) -> list[SequenceGroup]:
    """Group the sequences between `cu_seqlens` `[sequences + 1]` so that lengths differ by less than a factor of two.

    `of_keys` is the same tensor, or counts more keys than queries: a sequence's last query attends to all of its keys.
    """
    kind = 64 * _doublings(cu_seqlens) + _doublings(of_keys)
    groups = (torch.nonzero(kind == k).flatten() for k in kind.unique())
    if of_keys is not cu_seqlens:
        return [_group_with_more_keys(cu_seqlens, of_keys, members) for members in groups]
    return [_group(cu_seqlens, members, cp, cp_rank) for members in groups]


def _doublings(cu_seqlens: Tensor) -> Tensor:
    return torch.ceil(torch.log2(cu_seqlens.diff().float())).int()


def _group_with_more_keys(cu_seqlens: Tensor, of_keys: Tensor, members: Tensor) -> SequenceGroup:
    (queries, at, real), (keys, key_at, known) = (_places(ends, members) for ends in (cu_seqlens, of_keys))
    more = known.sum(1, keepdim=True) - real.sum(1, keepdim=True)
    return SequenceGroup(queries, keys, real, _back(at + more, key_at, known))


def _group(cu_seqlens: Tensor, members: Tensor, cp: int, cp_rank: int) -> SequenceGroup:
    places = [_places(cu_seqlens, members, cp, rank) for rank in range(cp)]
    queries, at, real = places[cp_rank]
    if cp == 1:
        return SequenceGroup(queries, queries, real, None)
    keys, key_at, known = (torch.cat(column, 1) for column in zip(*places, strict=True))
    keys = keys + torch.arange(cp, device=keys.device).repeat_interleave(queries.shape[1]) * (int(cu_seqlens[-1]) // cp)
    return SequenceGroup(queries, keys, real, _back(at, key_at, known))


def _places(cu_seqlens: Tensor, members: Tensor, cp: int = 1, rank: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return for a rank's tokens the index in the pack, the position in the sequence, and whether they are real."""
    starts, lengths = (ends[members, None].long() for ends in (cu_seqlens[:-1], cu_seqlens.diff()))
    chunk = lengths // (2 * cp)
    at = torch.arange(int(lengths.max()) // cp, device=lengths.device)[None]
    real = at < lengths // cp
    at = torch.where(real, at, 0)
    position = at if cp == 1 else at + torch.where(at < chunk, rank, 2 * cp - 2 - rank) * chunk
    return starts // cp + at, position, real


def _back(at: Tensor, key_at: Tensor, known: Tensor) -> Tensor:
    back = at[:, :, None] - key_at[:, None]
    return back.masked_fill(~known[:, None], -1)[:, None]
