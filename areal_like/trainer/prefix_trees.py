"""Which sequences of a batch begin with the same tokens, as trees in which a common run of tokens is there once.

A sequence is the path from a root to its leaf, so that n samples of a prompt are a tree of depth 1, and the branches of
a conversation one that branches at its turns. A node attends to the keys and values of its path, whose gradients are
added up: the same numbers as with a path for each ("Prefix Grouper", arXiv:2506.05433, is the tree of depth 1).
No torch, no communication.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from areal_like.types import Batch, Ints

# To gather so many keys for a node of their own costs at most what a token costs in a layer.
KEYS_PER_TOKEN = 64


@dataclass(frozen=True)
class PrefixTrees:
    """Trees over the sequences of a batch; nodes are numbered tree after tree.

    `parents` `[nodes]` is -1 for a root. A node has the tokens of sequence `sources` from position `starts` to before
    `ends`, all `[nodes]`. `leaves` `[sequences]` is the node that ends with a sequence's last token, and `families`
    `[sequences]` its tree, counted from 0.
    """

    parents: NDArray[np.int64]
    sources: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    leaves: NDArray[np.int64]
    families: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each node, `[nodes]`."""
        return self.ends - self.starts

    def nodes_of(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the nodes of the trees that some sequences are in, in ascending order."""
        chosen = np.zeros(len(self.leaves), bool)
        chosen[self.families[sequences]] = True
        return np.flatnonzero(chosen[self.families[self.sources]])

    def paths(self, nodes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the nodes from the root to each of `nodes`, path after path, and before that each one's path."""
        path, node = np.arange(len(nodes)), nodes
        paths, found = [path], [node]
        while len(path := path[(parents := self.parents[node]) >= 0]):
            node = parents[parents >= 0]
            paths.append(path)
            found.append(node)
        whose = np.concatenate(paths[::-1])
        order = np.argsort(whose, kind="stable")
        return whose[order], np.concatenate(found[::-1])[order]


def separate(lengths: Ints | Sequence[int]) -> PrefixTrees:
    """Return the trees of sequences that share nothing."""
    n = np.arange(len(lengths))
    return PrefixTrees(np.full(len(n), -1), n, np.zeros_like(n), np.asarray(lengths, np.int64), n, n)


def find_trees(batch: Batch, *, max_tokens: int, alignment: int) -> PrefixTrees:
    """Return the trees of neighbours that begin with the same prompt, which ends before the first trained token.

    Where the prompts of neighbours differ in length, as those of turns that another sequence is trained on, the shorter
    one counts. Tokens behind it are shared only with the same experts, if the batch has routes. A tree that is more
    than `max_tokens` with every node padded to `alignment` is cut into several; and nothing is shared that would take
    more tokens in padding, or more keys to gather, than it saves.
    """
    found = _Nodes(
        max_tokens, alignment, np.zeros(len(batch.lengths), np.int64), np.zeros(len(batch.lengths), np.int64)
    )
    starts = np.cumsum(batch.lengths, dtype=np.int64) - batch.lengths
    for first, last, prompt in _find_alike(batch, starts):
        if last == first + 1:
            found.add(first, int(batch.lengths[first]), 0)
            continue
        rows = [_make_rows(batch, starts[i], batch.lengths[i], prompt) for i in range(first, last)]
        order = sorted(range(last - first), key=[each.tobytes() for each in rows].__getitem__)
        common = [_count_common(rows[i], rows[after]) for i, after in pairwise(order)]
        for i, shared in zip(order, [0, *_keep_worthwhile(common, alignment)], strict=True):
            found.add(first + i, len(rows[i]), shared)
    parents, sources, begins, ends = np.array(found.nodes, np.int64).T
    return PrefixTrees(parents, sources, begins, ends, found.leaves, found.families)


def _find_alike(batch: Batch, starts: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of sequences, from the first to before the last, with the length of the prompt that they share."""
    tokens, ends = batch.tokens, starts + batch.lengths
    trained = np.append(np.flatnonzero(batch.fields.get("loss_mask", np.empty(0)) > 0), len(tokens))
    next_trained = trained[np.searchsorted(trained, starts)]
    prompts = np.where(next_trained < ends, next_trained - starts, 0).tolist()
    first, shared = 0, prompts[0]
    for i, (start, prompt) in enumerate(zip(starts.tolist(), prompts, strict=True)):
        both, lead = min(shared, prompt), starts[first]
        if both and np.array_equal(tokens[start : start + both], tokens[lead : lead + both]):
            shared = both
        elif i:
            yield first, i, shared
            first, shared = i, prompt
    yield first, len(starts), shared


def _make_rows(batch: Batch, start: int, length: int, prompt: int) -> NDArray[np.uint8]:
    """Return a row of bytes for each token of a sequence; tokens with equal rows are computed alike, and sort alike."""
    here = slice(start, start + length)
    words = batch.tokens[here].astype(">u4").view(np.uint8).reshape(length, 4)
    if batch.routes is None:
        return words
    routes = batch.routes[here].copy()
    routes[:prompt] = 0
    return np.concatenate([words, routes.reshape(length, -1).view(np.uint8)], 1)


def _count_common(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> int:
    """Return how many first rows are equal."""
    n = min(len(one), len(other))
    differ = (one[:n] != other[:n]).any(1)
    return int(differ.argmax()) if differ.any() else n


def _keep_worthwhile(common: Sequence[int], alignment: int) -> list[int]:
    """Lower the tokens that neighbours have in common where to share them would cost more than it saves.

    Neighbours with equal numbers branch from one node, of which all but one copy of its tokens is saved; it has padding
    of its own, half the alignment on average, and gathers the keys of its path.
    """
    result = [0] * len(common)
    nodes: list[tuple[int, list[int]]] = []  # that are open: where each ends, and the pairs that branch there
    for i, end in enumerate([*common, 0]):
        pairs = [i]
        while nodes and nodes[-1][0] > end:
            at, branches = nodes.pop()
            start = max(end, nodes[-1][0] if nodes else 0)
            if (len(branches) * (at - start) - alignment // 2) * KEYS_PER_TOKEN >= at:
                for pair in branches:
                    result[pair] = at
            elif start > end:
                nodes[-1][1].extend(branches)
            else:
                pairs += branches
        if nodes and nodes[-1][0] == end:
            nodes[-1][1].extend(pairs)
        else:
            nodes.append((end, pairs))
    return result


@dataclass
class _Nodes:
    """Builds trees of sequences that come in the order of their tokens; `path` leads to the last one's leaf."""

    max_tokens: int
    alignment: int
    leaves: NDArray[np.int64]
    families: NDArray[np.int64]
    nodes: list[list[int]] = field(default_factory=list)  # parent, source, start, end
    path: list[int] = field(default_factory=list)
    size: int = 0  # of the tree, padded
    family: int = -1

    def add(self, sequence: int, length: int, common: int) -> None:
        """Add a sequence that begins with `common` tokens of the last one."""
        path = [node for node in self.path if self.nodes[node][2] < common]
        start, end = self.nodes[path[-1]][2:] if path else (0, 0)
        added = self._pad(length - common)
        if common < end:
            added += self._pad(common - start) + self._pad(end - common) - self._pad(end - start)
        if not path or self.size + added > self.max_tokens:
            self.family += 1
            path, common, self.size, added = [], 0, 0, self._pad(length)
        elif common < end:
            path[-1] = self._split(path[-1], common)
        if common < length:
            self.nodes.append([path[-1] if path else -1, sequence, common, length])
            path.append(len(self.nodes) - 1)
        self.path, self.size = path, self.size + added
        self.leaves[sequence], self.families[sequence] = path[-1], self.family

    def _split(self, node: int, at: int) -> int:
        """Cut a node in two and return the upper one, which is new."""
        parent, source, start, _ = self.nodes[node]
        self.nodes.append([parent, source, start, at])
        self.nodes[node][0], self.nodes[node][2] = len(self.nodes) - 1, at
        return len(self.nodes) - 1

    def _pad(self, tokens: int) -> int:
        return -(-tokens // self.alignment) * self.alignment
