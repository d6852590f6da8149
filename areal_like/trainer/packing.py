"""Which rank trains on which sequence, and how sequences are packed into micro-batches. No torch, no communication.

Every rank computes the same schedule from the same batch, so that nothing has to be sent. Invariants:

1. Every sequence is in exactly one micro-batch of exactly one data-parallel rank.
2. All data-parallel ranks have the same number of micro-batches, because expert-parallel groups fold over data
   parallelism and their collectives must meet; it is a multiple of `multiple` (the size of a group, for interleaving).
3. A micro-batch holds at most `max_tokens` tokens, padding included.
4. Each sequence is padded to `alignment`: 2*cp*tp where context parallelism cuts it into 2*cp chunks that sequence
   parallelism divides again, else tp; for FP8 a multiple of that, so that each rank has whole blocks of rows.
5. Ranks differ by little in their tokens: the longest sequence goes to the lightest micro-batch first (LPT rule,
   Graham 1969), then heavy and light micro-batches are dealt out alternately.
6. A micro-batch that no sequence was left for holds one dummy sequence, which is trained on nowhere.
7. Sequences that begin alike and share that (`prompts.py`) are in one micro-batch.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from allocation import ParallelSizes
from areal_like.config.schema import MicroBatchConfig
from areal_like.trainer.prompts import Prefixes, alone, common_prompts
from areal_like.types import Batch, Ints


class PackingError(ValueError):
    """A batch that cannot be packed; the message says which limit to raise."""


type Schedule = tuple[tuple[tuple[int, ...], ...], ...]
"""`schedule[dp_rank][i]` are the numbers of the sequences in that rank's i-th micro-batch; () is a dummy."""


@dataclass(frozen=True)
class Keys:
    """Keys of each piece of a pack, where these are more than its own.

    `places` `[keys]` are in the pack, piece after piece; `cu_seqlens` `[pieces + 1]` and `max_seqlen` count them. A
    piece's last query attends to all of its keys, the one before to all but the last, and so on.
    """

    places: Ints
    cu_seqlens: Ints
    max_seqlen: int


@dataclass(frozen=True)
class MicroBatch:
    """One rank's share of one packed micro-batch; shapes with t = its tokens / cp.

    `tokens` and `positions` are `[t]`. The place `rows[i]` of them predicts the token that is at `targets[i]` in the
    batch; padding predicts nothing, nor does the last token of a sequence. Pieces are sequences, or what they have in
    common and what is their own; `cu_seqlens` is `[pieces + 1]` and, like `max_seqlen`, counts whole padded pieces, as
    Megatron's PackedSeqParams want. `keys` is None where each piece attends to itself alone.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    rows: NDArray[np.int64]
    targets: NDArray[np.int64]
    cu_seqlens: Ints
    max_seqlen: int
    keys: Keys | None = None


def sequence_alignment(tp: int, cp: int, rows: int = 1) -> int:
    """Length that every packed sequence must be a multiple of (`megatron/core/utils.py`, packed sequences).

    `rows` is what the rows of a rank have to be a multiple of, 1 but for FP8.
    """
    return math.lcm(2 * cp * tp if cp > 1 else tp, rows * cp * tp)


def alignment_of(backend: str, sizes: ParallelSizes, rows: int = 1) -> int:
    """`sequence_alignment` of a trainer's layout; FSDP cuts a whole pack into c parts."""
    return sizes.cp if backend == "fsdp" else sequence_alignment(sizes.tp, sizes.cp, rows)


def make_schedule(
    lengths: Sequence[int] | Ints,
    *,
    dp: int,
    max_tokens: int,
    alignment: int,
    multiple: int = 1,
    prefixes: Prefixes | None = None,
) -> Schedule:
    """Distributes sequences over `dp` ranks and packs each rank's share into micro-batches.

    `max_tokens` is per micro-batch before context parallelism divides it. Families of `prefixes` stay together. Raises
    PackingError for an empty batch and for a sequence that is longer than a micro-batch.
    """
    if not len(lengths) or min(lengths) == 0:
        raise PackingError("a training batch needs at least one sequence, and every sequence at least one token")
    prefixes = prefixes or alone(len(lengths))
    common = prefixes.lengths[prefixes.leads].astype(np.int64)
    own = np.bincount(prefixes.families, _pad(np.asarray(lengths, np.int64) - prefixes.lengths, alignment))
    padded = (own.astype(np.int64) + _pad(common, alignment)).tolist()
    if max(padded) > max_tokens:
        raise PackingError(
            f"a sequence of {max(lengths)} tokens (padded to {max(padded)}) does not fit into one micro-batch: "
            f"mb_spec.max_tokens_per_mb is {max_tokens}; set it to {max(padded)} or more, or generate shorter responses"
        )
    order = np.argsort(np.negative(padded), stable=True).tolist()
    n = _round_up(-(-sum(padded) // (dp * max_tokens)), multiple)
    while (bins := _lightest_first(order, padded, dp * n, max_tokens)) is None:
        n = _round_up(n + 1 + n // 16, multiple)

    bins.sort(key=lambda members: sum(padded[i] for i in members), reverse=True)
    ends = np.cumsum(np.bincount(prefixes.families)).tolist()
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(dp)]
    for i, members in enumerate(bins):
        turn, place = divmod(i, dp)
        sequences = chain.from_iterable(range(ends[it - 1] if it else 0, ends[it]) for it in sorted(members))
        ranks[place if turn % 2 == 0 else dp - 1 - place].append(tuple(sequences))
    return tuple(tuple(rank) for rank in ranks)


def pack(
    tokens: Ints,
    lengths: Ints,
    members: Sequence[int],
    alignment: int,
    *,
    prefixes: Prefixes | None = None,
    cp: int = 1,
    cp_rank: int = 0,
) -> MicroBatch:
    """Packs the sequences `members` back to back and takes this rank's share of each.

    Rows are counted on whole sequences, before context parallelism cuts them: a chunk's last token predicts the first
    token of another rank's chunk. Each sequence is cut into 2*cp chunks of which rank r gets the r-th from both ends,
    so that causal attention costs every rank the same (Megatron's `get_batch_on_this_cp_rank`). What `prefixes` says
    that members of a family have in common is there once, before what is their own; `cp` is 1 then.
    """
    chosen = np.asarray(members, np.int64)
    length, start = lengths[chosen].astype(np.int64), np.cumsum(lengths, dtype=np.int64)[chosen] - lengths[chosen]
    if not members:
        length = start = np.zeros(1, np.int64)
    shared = (prefixes or alone(len(lengths))).of(chosen) if members else alone(1)
    pieces = _pieces(start, length, shared)
    padded = _pad(np.maximum(pieces.length, 1), alignment)
    ends = np.concatenate(([0], np.cumsum(padded)))

    piece, offset = _count(padded)  # of every place in the pack
    before = np.maximum(length - 1, 0)
    sequence, position = _count(before)  # of every token that predicts one
    predicting = np.where(
        position < pieces.position[pieces.own[sequence]], pieces.common[sequence], pieces.own[sequence]
    )
    rows = ends[predicting] + position - pieces.position[predicting]
    targets = start[sequence] + position + 1
    if cp > 1:
        chunk = offset // (padded // (2 * cp))[piece]
        share = (chunk == cp_rank) | (chunk == 2 * cp - 1 - cp_rank)
        piece, offset = piece[share], offset[share]
        here = share[rows]
        rows, targets = (np.cumsum(share) - 1)[rows[here]], targets[here]
    place = np.minimum(pieces.start[piece] + offset, len(tokens) - 1)  # in the batch
    return MicroBatch(
        np.where(offset < pieces.length[piece], tokens[place], 0).astype(np.int64),
        pieces.position[piece] + offset,
        rows,
        targets,
        ends.astype(np.int32),
        int(padded.max()),
        _keys(pieces, padded, ends) if shared.lengths.any() else None,
    )


@dataclass(frozen=True)
class _Pieces:
    """`start` in the batch, `length`, and the first's `position` in its sequence, each `[pieces]`.

    Of every sequence the piece that is its `own`, and that which it has in `common` with others, `[sequences]`.
    """

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    position: NDArray[np.int64]
    own: NDArray[np.int64]
    common: NDArray[np.int64]


def _pieces(start: NDArray[np.int64], length: NDArray[np.int64], prefixes: Prefixes) -> _Pieces:
    leads = prefixes.leads & (prefixes.lengths > 0)
    own = np.arange(len(start)) + np.cumsum(leads)
    common = np.maximum.accumulate(np.where(leads, own - 1, 0))
    pieces = np.zeros((3, len(start) + np.count_nonzero(leads)), np.int64)
    pieces[:, own] = start + prefixes.lengths, length - prefixes.lengths, prefixes.lengths
    pieces[:2, own[leads] - 1] = start[leads], prefixes.lengths[leads]
    return _Pieces(pieces[0], pieces[1], pieces[2], own, common)


def _keys(pieces: _Pieces, padded: NDArray[np.int64], ends: NDArray[np.int64]) -> Keys:
    before = np.zeros_like(padded)  # the piece with what a piece attends to beside itself
    before[pieces.own] = pieces.common
    counts = pieces.position + padded
    piece, i = _count(counts)
    common = pieces.position[piece]
    places = np.where(i < common, ends[before[piece]] + i, ends[piece] + i - common)
    return Keys(places.astype(np.int32), np.concatenate(([0], np.cumsum(counts))).astype(np.int32), int(counts.max()))


def _count(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for that many places each the owner, and the place within the owner."""
    whose = np.repeat(np.arange(len(counts)), counts)
    return whose, np.arange(len(whose)) - (np.cumsum(counts) - counts)[whose]


def _pad(lengths: NDArray[np.int64], alignment: int) -> NDArray[np.int64]:
    return -(-lengths // alignment) * alignment


def packs(
    batch: Batch,
    section: MicroBatchConfig,
    *,
    dp: int,
    dp_rank: int,
    alignment: int,
    multiple: int = 1,
    cp: int = 1,
    cp_rank: int = 0,
) -> tuple[int, Callable[[int], MicroBatch]]:
    """Return how many micro-batches each rank has of a batch, and what packs this rank's i-th and remembers it."""
    limit = section.max_tokens_per_mb
    prefixes = common_prompts(batch, max_tokens=limit, alignment=alignment) if section.share_prompts else None
    share = make_schedule(
        batch.lengths, dp=dp, max_tokens=limit, alignment=alignment, multiple=multiple, prefixes=prefixes
    )[dp_rank]

    @cache
    def packed(i: int) -> MicroBatch:
        return pack(batch.tokens, batch.lengths, share[i], alignment, prefixes=prefixes, cp=cp, cp_rank=cp_rank)

    return len(share), packed


def _lightest_first(order: Sequence[int], sizes: Sequence[int], n_bins: int, capacity: int) -> list[list[int]] | None:
    """Puts each item, largest first, into the lightest bin; None when one does not fit."""
    heap = [(0, i) for i in range(n_bins)]
    bins: list[list[int]] = [[] for _ in range(n_bins)]
    for item in order:
        load, i = heap[0]
        if load + sizes[item] > capacity:
            return None
        heapq.heapreplace(heap, (load + sizes[item], i))
        bins[i].append(item)
    return bins


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
