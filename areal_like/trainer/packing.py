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
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from allocation import ParallelSizes
from areal_like.types import Ints

NO_TARGET = -1


class PackingError(ValueError):
    """A batch that cannot be packed; the message says which limit to raise."""


@dataclass(frozen=True)
class Schedule:
    """`micro_batches[dp_rank][i]` is the tuple of sequence numbers in that rank's i-th micro-batch; () is a dummy."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    alignment: int


@dataclass(frozen=True)
class MicroBatch:
    """One rank's share of one packed micro-batch; shapes with t = its tokens / cp.

    `tokens`, `positions` and `targets` are `[t]`; `targets[i]` is the place in the batch of the token that
    position i predicts, or NO_TARGET for padding and for the last token of a sequence. `cu_seqlens` is
    `[sequences + 1]` and, like `max_seqlen`, counts whole padded sequences, as Megatron's PackedSeqParams want.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    targets: NDArray[np.int64]
    cu_seqlens: Ints
    max_seqlen: int


def sequence_alignment(tp: int, cp: int, rows: int = 1) -> int:
    """Length that every packed sequence must be a multiple of (`megatron/core/utils.py`, packed sequences).

    `rows` is what the rows of a rank have to be a multiple of, 1 but for FP8.
    """
    return math.lcm(2 * cp * tp if cp > 1 else tp, rows * cp * tp)


def alignment_of(backend: str, sizes: ParallelSizes, rows: int = 1) -> int:
    """`sequence_alignment` of a trainer's layout; FSDP cuts a whole pack into c parts."""
    return sizes.cp if backend == "fsdp" else sequence_alignment(sizes.tp, sizes.cp, rows)


def make_schedule(
    lengths: Sequence[int] | Ints, *, dp: int, max_tokens: int, alignment: int, multiple: int = 1
) -> Schedule:
    """Distributes sequences over `dp` ranks and packs each rank's share into micro-batches.

    `max_tokens` is per micro-batch before context parallelism divides it. Raises PackingError for an empty batch and
    for a sequence that is longer than a micro-batch.
    """
    padded = (-(-np.asarray(lengths, np.int64) // alignment) * alignment).tolist()
    if not padded or min(padded) == 0:
        raise PackingError("a training batch needs at least one sequence, and every sequence at least one token")
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
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(dp)]
    for i, members in enumerate(bins):
        turn, place = divmod(i, dp)
        ranks[place if turn % 2 == 0 else dp - 1 - place].append(tuple(sorted(members)))
    return Schedule(tuple(tuple(rank) for rank in ranks), alignment)


def pack(
    tokens: Ints, lengths: Ints, members: Sequence[int], alignment: int, *, cp: int = 1, cp_rank: int = 0
) -> MicroBatch:
    """Packs the sequences `members` back to back and takes this rank's share of each.

    Targets are set on whole sequences, before context parallelism cuts them: a chunk's last token predicts the first
    token of another rank's chunk. Each sequence is cut into 2*cp chunks of which rank r gets the r-th from both ends,
    so that causal attention costs every rank the same (Megatron's `get_batch_on_this_cp_rank`).
    """
    chosen = np.asarray(members, np.int64)
    own, starts = lengths[chosen].astype(np.int64), np.cumsum(lengths, dtype=np.int64)[chosen] - lengths[chosen]
    if not members:
        own = starts = np.zeros(1, np.int64)
    padded = -(-np.maximum(own, 1) // alignment) * alignment
    cu_seqlens = np.concatenate(([0], np.cumsum(padded)))

    sequence = np.repeat(np.arange(len(padded)), padded)  # of every place in the pack
    positions = np.arange(cu_seqlens[-1]) - cu_seqlens[sequence]
    if cp > 1:
        chunk = positions // (padded // (2 * cp))[sequence]
        share = (chunk == cp_rank) | (chunk == 2 * cp - 1 - cp_rank)
        sequence, positions = sequence[share], positions[share]
    place = starts[sequence] + positions  # in the batch
    packed = np.where(positions < own[sequence], tokens[np.minimum(place, len(tokens) - 1)], 0)
    targets = np.where(positions < own[sequence] - 1, place + 1, NO_TARGET)
    return MicroBatch(packed.astype(np.int64), positions, targets, cu_seqlens.astype(np.int32), int(padded.max()))


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
