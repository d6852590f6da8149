"""Distribution of sequences over ranks and packing into micro-batches, without torch and communication.

Every rank computes the same schedule from the same batch, so that nothing has to be sent. Invariants:

1. Every sequence is in exactly one micro-batch of exactly one data-parallel rank.
2. All data-parallel ranks have the same number of micro-batches, because expert-parallel groups fold over data
   parallelism and their collectives must meet; it is a multiple of `multiple` (the size of a group, for interleaving).
3. A micro-batch holds at most `max_tokens` tokens, padding included.
4. Each sequence is padded to `alignment`: 2*cp*tp if context parallelism splits it into 2*cp chunks that sequence
parallelism divides again, else tp; for FP8 a multiple of this, so that each rank has whole blocks of rows.
5. Ranks have similar costs, and so have the micro-batches that ranks which meet compute at the same time: the
   costliest sequence goes first, to the lightest place (LPT rule, Graham 1969). There are no more micro-batches than
   with equal numbers of tokens.
6. A micro-batch without sequences holds one dummy sequence, which is not trained on.
7. The sequences of a tree (`prefix_trees.py`) are in one micro-batch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from allocation.model_spec import ModelSpec
from allocation.parameters import sequence_products
from allocation.plan import ParallelSizes
from areal_like.config.schema import MicroBatchConfig
from areal_like.trainer.prefix_trees import PrefixTrees, find_trees, separate
from areal_like.types import Batch, Ints


class PackingError(ValueError):
    """A batch that cannot be packed; the message names the limit to raise."""


type Schedule = tuple[tuple[tuple[int, ...], ...], ...]
"""`schedule[dp_rank][i]` are the numbers of the sequences in that rank's i-th micro-batch; () is a dummy."""


@dataclass(frozen=True)
class Keys:
    """The keys of each piece of a pack, if they are not only the piece's own.

    `places` `[keys]` are indices into the pack, piece by piece; `cu_seqlens` `[pieces + 1]` and `max_seqlen` count
    them. A piece's last query attends to all of its keys, the one before to all but the last, and so on. `positions`
    has the positions of all tokens of the pack. With context parallelism `places` index the concatenated shares of all
    ranks.
    """

    places: Ints
    cu_seqlens: Ints
    max_seqlen: int
    positions: NDArray[np.int64]


@dataclass(frozen=True)
class MicroBatch:
    """One rank's share of one packed micro-batch; shapes with t = its tokens / cp.

    `tokens` and `positions` are `[t]`; `places` has the index of each token in the batch, -1 for padding. The token at
    `rows[i]` predicts the token at `targets[i]` of the batch; padding and the last token of a sequence predict nothing.
    A token that several sequences share is a row of each of them. Pieces are the nodes of trees, so they are whole
    sequences if nothing is shared; `cu_seqlens` is `[pieces + 1]` and, like `max_seqlen`, counts whole padded pieces,
    as Megatron's PackedSeqParams require. `keys` is None if each piece attends only to itself; with keys and context
    parallelism, the pieces are those of this rank's share.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    rows: NDArray[np.int64]
    targets: NDArray[np.int64]
    cu_seqlens: Ints
    max_seqlen: int
    places: NDArray[np.int64]
    keys: Keys | None = None


def sequence_alignment(tp: int, cp: int, rows: int = 1) -> int:
    """Return the length that every packed sequence must be a multiple of (`megatron/core/utils.py`, packed sequences).

    `rows` is the required multiple of a rank's rows, 1 except for FP8.
    """
    return math.lcm(2 * cp * tp if cp > 1 else tp, rows * cp * tp)


def alignment_of(backend: str, sizes: ParallelSizes, rows: int = 1) -> int:
    """Return the `sequence_alignment` of a trainer's layout; FSDP splits a whole pack into c parts."""
    return sizes.cp if backend == "fsdp" else sequence_alignment(sizes.tp, sizes.cp, rows)


def ranks_meet(backend: str, sizes: ParallelSizes) -> bool:
    """Return whether data-parallel ranks exchange parameters or experts' tokens in every micro-batch."""
    return backend == "fsdp" or sizes.ep > 1


def make_schedule(
    lengths: Sequence[int] | Ints,
    *,
    dp: int,
    max_tokens: int,
    alignment: int,
    multiple: int = 1,
    trees: PrefixTrees | None = None,
    model: ModelSpec | None = None,
    meet: bool = True,
) -> Schedule:
    """Distribute sequences over `dp` ranks and pack each rank's share into micro-batches.

    `max_tokens` is per micro-batch before context parallelism divides it. The sequences of one of `trees` stay
    together. Costs are the FLOPs of `model`, without it tokens. Ranks that `meet` wait for each other in every
    micro-batch, others only at the end. Raises PackingError for an empty batch and for a sequence that is longer than
    a micro-batch.
    """
    _check(lengths)
    trees = trees or separate(lengths)
    of_nodes = np.bincount(trees.families[trees.sources], _pad(trees.lengths, alignment))
    padded = of_nodes.astype(np.int64).tolist()
    costs = padded if model is None else _costs(trees, alignment, model)
    if max(padded) > max_tokens:
        raise PackingError(
            f"a sequence of {max(lengths)} tokens (padded to {max(padded)}) does not fit into one micro-batch: "
            f"mb_spec.max_tokens_per_mb is {max_tokens}; set it to {max(padded)} or more, or generate shorter responses"
        )
    of_family = np.split(np.argsort(trees.families, stable=True), np.cumsum(np.bincount(trees.families))[:-1])
    n = _round_up(-(-sum(padded) // (dp * max_tokens)), multiple)
    while True:
        fill = partial(_fill, sizes=padded, dp=dp, n=n, capacity=max_tokens)
        if ranks := fill(costs, meet=meet) or fill(padded, meet=True):
            return tuple(tuple(_join(of_family, part) for part in rank) for rank in ranks)
        n = _round_up(n + 1 + n // 16, multiple)


def _join(of_family: Sequence[NDArray[np.int64]], families: Sequence[int]) -> tuple[int, ...]:
    return tuple(chain.from_iterable(of_family[family].tolist() for family in sorted(families)))


def _costs(trees: PrefixTrees, alignment: int, model: ModelSpec) -> list[float]:
    """Return the multiplications of each tree: a node's tokens attend to those of its path."""
    ends = trees.starts + _pad(trees.lengths, alignment)
    of_nodes = [
        sequence_products(model, end) - sequence_products(model, start)
        for start, end in zip(trees.starts.tolist(), ends.tolist(), strict=True)
    ]
    costs: list[float] = np.bincount(trees.families[trees.sources], of_nodes).tolist()
    return costs


def _check(lengths: Sequence[int] | Ints) -> None:
    if not len(lengths) or min(lengths) == 0:
        raise PackingError("a training batch needs at least one sequence, and every sequence at least one token")


def pack(
    tokens: Ints,
    lengths: Ints,
    members: Sequence[int],
    alignment: int,
    *,
    trees: PrefixTrees | None = None,
    cp: int = 1,
    cp_rank: int = 0,
) -> MicroBatch:
    """Pack the sequences `members`, which are all sequences of some `trees`, and return this rank's share of each.

    Rows are counted on whole sequences, before context parallelism splits them: a chunk's last token predicts the first
    token of another rank's chunk. Each sequence is split into 2*cp chunks, and rank r gets the r-th from both ends, so
    that causal attention costs every rank the same (Megatron's `get_batch_on_this_cp_rank`). A node of a tree occurs
    once; a pack of `trees` is split as one sequence, so that every layer finds keys in the same way.
    """
    trees, shares, chosen = trees or separate(lengths), trees is not None, np.asarray(members, np.int64)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    nodes = trees.nodes_of(chosen)
    length, position = trees.lengths[nodes], trees.starts[nodes]  # of each node, and its start in its path
    start = starts[trees.sources[nodes]] + position
    if not members:
        start = length = position = np.zeros(1, np.int64)
    padded = _pad(np.maximum(length, 1), alignment)
    ends = np.concatenate(([0], np.cumsum(padded)))

    piece, offset = _count(padded)  # for every place in the pack
    rows, targets = _predictions(trees, chosen, starts, nodes, ends)
    keys = None
    if position.any() or (shares and cp > 1):
        keys = _keys(trees, nodes, padded, ends, position[piece] + offset)
    if cp > 1:
        chunk = offset // (padded // (2 * cp))[piece] if keys is None else _chunks(len(piece), cp)
        share = _find_share(chunk, cp, cp_rank)
        if keys is not None:
            keys, ends = share_keys(keys, ends, share, cp)
        piece, offset = piece[share], offset[share]
        rows, targets = _share_predictions(rows, targets, share)
    place, is_token = np.minimum(start[piece] + offset, len(tokens) - 1), offset < length[piece]  # in the batch
    return MicroBatch(
        np.where(is_token, tokens[place], 0).astype(np.int64),
        position[piece] + offset,
        rows,
        targets,
        ends.astype(np.int32),
        int(padded.max() if keys is None else np.diff(ends).max()),
        np.where(is_token, place, -1),
        keys,
    )


def _predictions(
    trees: PrefixTrees,
    sequences: NDArray[np.int64],
    starts: NDArray[np.int64],
    nodes: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for every token, except the first of each sequence, its predecessor's index in the pack and its own place.

    `nodes` are in the pack between `ends`; `starts` has the starts of all sequences in the batch.
    """
    leaves = trees.leaves[sequences]
    path, node = trees.paths(leaves)
    part, i = _count(trees.lengths[node] - (node == leaves[path]))  # a sequence's last token predicts nothing
    path, node = path[part], node[part]
    return ends[np.searchsorted(nodes, node)] + i, starts[sequences[path]] + trees.starts[node] + i + 1


def _find_share(chunk: NDArray[np.int64], cp: int, cp_rank: int) -> NDArray[np.bool]:
    """Return the places of a rank, which has the r-th chunk from both ends."""
    return (chunk == cp_rank) | (chunk == 2 * cp - 1 - cp_rank)


def _share_predictions(
    rows: NDArray[np.int64], targets: NDArray[np.int64], share: NDArray[np.bool]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the predictions of a rank's `share` of a pack, with rows counted in the share."""
    here = share[rows]
    return (np.cumsum(share) - 1)[rows[here]], targets[here]


def _keys(
    trees: PrefixTrees,
    nodes: NDArray[np.int64],
    padded: NDArray[np.int64],
    ends: NDArray[np.int64],
    positions: NDArray[np.int64],
) -> Keys:
    """Return the keys of each node: its path's keys, and its own padding."""
    if not len(nodes):  # a dummy
        return Keys(np.arange(ends[-1], dtype=np.int32), ends.astype(np.int32), int(ends[-1]), positions)
    path, node = trees.paths(nodes)
    counts = np.where(node == nodes[path], padded[path], trees.lengths[node])
    part, i = _count(counts)
    places = ends[np.searchsorted(nodes, node)][part] + i
    totals = np.bincount(path, counts).astype(np.int64)
    key_ends = np.concatenate(([0], np.cumsum(totals))).astype(np.int32)
    return Keys(places.astype(np.int32), key_ends, int(totals.max()), positions)


def share_keys(keys: Keys, ends: NDArray[np.int64], share: NDArray[np.bool], cp: int) -> tuple[Keys, NDArray[np.int64]]:
    """Return the keys of a rank's `share` of a pack, and the ends of its pieces in the share.

    A piece is a run of places of one node in the share; its keys are its last place's. Each rank's share has two
    chunks, the r-th from both ends.
    """
    n = len(share)
    node = np.searchsorted(ends, np.arange(n), side="right") - 1
    mine = np.flatnonzero(share)
    last = np.flatnonzero((np.diff(node[mine], append=-1) != 0) | (np.diff(mine, append=-1) != 1))
    at, of_node = mine[last], node[mine[last]]
    counts = np.diff(keys.cu_seqlens)[of_node] - (ends[of_node + 1] - 1 - at)  # the last place of a node has all keys
    piece, i = _count(counts.astype(np.int64))
    places = keys.places[keys.cu_seqlens[of_node][piece] + i]
    chunk = _chunks(n, cp)
    order = np.argsort(np.minimum(chunk, 2 * cp - 1 - chunk), kind="stable")  # places, rank by rank
    gathered = np.argsort(order)[places].astype(np.int32)
    key_ends = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return Keys(gathered, key_ends, int(counts.max()), keys.positions), np.concatenate(([0], last + 1))


def _chunks(places: int, cp: int) -> NDArray[np.int64]:
    """Return the number of the chunk, of 2*cp, of each place of a pack."""
    return np.arange(places) * 2 * cp // places


def _count(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the owner of each place, and the place within the owner; owners have `counts` places."""
    whose = np.repeat(np.arange(len(counts)), counts)
    return whose, np.arange(len(whose)) - (np.cumsum(counts) - counts)[whose]


def _pad(lengths: NDArray[np.int64], alignment: int) -> NDArray[np.int64]:
    return -(-lengths // alignment) * alignment


def schedule_batch(
    batch: Batch,
    section: MicroBatchConfig,
    *,
    dp: int,
    alignment: int,
    multiple: int = 1,
    model: ModelSpec | None = None,
    meet: bool = True,
) -> tuple[Schedule, PrefixTrees | None]:
    """Return the schedule of a batch, and its trees if prompts are shared."""
    limit = section.max_tokens_per_mb
    _check(batch.lengths)
    trees = find_trees(batch, max_tokens=limit, alignment=alignment) if section.share_prompts else None
    schedule = make_schedule(
        batch.lengths,
        dp=dp,
        max_tokens=limit,
        alignment=alignment,
        multiple=multiple,
        trees=trees,
        model=model,
        meet=meet,
    )
    return schedule, trees


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
    model: ModelSpec | None = None,
    meet: bool = True,
) -> tuple[int, Callable[[int], MicroBatch]]:
    """Return the number of micro-batches per rank, and a cached function that packs this rank's i-th."""
    schedule, trees = schedule_batch(
        batch, section, dp=dp, alignment=alignment, multiple=multiple, model=model, meet=meet
    )
    share = schedule[dp_rank]

    @cache
    def pack_one(i: int) -> MicroBatch:
        return pack(batch.tokens, batch.lengths, share[i], alignment, trees=trees, cp=cp, cp_rank=cp_rank)

    return len(share), pack_one


def _fill(
    costs: Sequence[float], *, sizes: Sequence[int], dp: int, n: int, capacity: int, meet: bool
) -> list[list[list[int]]] | None:
    """Return the items of `n` micro-batches of each rank, costliest first; None if an item fits nowhere.

    Each item, costliest first, goes to the lightest micro-batch with room for it, of the lightest rank unless ranks
    `meet`. Then ranks get micro-batches that cost alike, and the lightest rank gets the costliest of them.
    """
    loads, room = np.zeros((n, dp)), np.full((n, dp), capacity)
    parts: list[list[int]] = [[] for _ in range(n * dp)]
    for item in np.argsort(np.negative(costs), stable=True).tolist():
        fits = room >= sizes[item]
        if not fits.any():
            return None
        if not meet:
            of_rank = np.where(fits.any(axis=0), loads.sum(axis=0), np.inf)
            fits &= np.arange(dp) == of_rank.argmin()
        i = int(np.where(fits, loads, np.inf).argmin())
        loads.flat[i] += costs[item]
        room.flat[i] -= sizes[item]
        parts[i].append(item)
    if not meet:
        order = np.argsort(-loads, axis=0, stable=True) * dp + np.arange(dp)
        return [[parts[i] for i in rank] for rank in order.T.tolist()]
    ranks: list[list[list[int]]] = [[] for _ in range(dp)]
    totals = np.zeros(dp)
    for alike in np.argsort(-loads.ravel(), stable=True).reshape(n, dp).tolist():
        for rank, i in zip(np.argsort(totals, stable=True).tolist(), alike, strict=True):
            ranks[rank].append(parts[i])
            totals[rank] += loads.flat[i]
    return ranks


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
