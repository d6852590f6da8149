"""Sequences of a batch with common prefixes, as trees in which a common run of tokens occurs once.

A sequence is the path from a root to its leaf, so n samples of a prompt are a tree of depth 1, and the branches of a
conversation are a tree that branches at its turns. A node attends to the keys and values of its path, whose gradients
are summed: the result equals separate paths' ("Prefix Grouper", arXiv:2506.05433, is the tree of depth 1). This
module uses neither torch nor communication.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_like.columns import column_of
from areal_like.types import Batch, Ints

type Inputs = Mapping[str, NDArray[Any]]  # columns of tokens as inputs

# Gathering this many keys for a separate node costs at most as much as a token in a layer.
KEYS_PER_TOKEN = 64


@dataclass(frozen=True)
class PrefixTrees:
    """Trees over the sequences of a batch; nodes are numbered tree after tree.

    `parents` `[nodes]` is -1 for a root. A node has the tokens of sequence `sources` from position `starts` up to
    `ends`, all `[nodes]`. `leaves` `[sequences]` is the node with a sequence's last token, and `families` `[sequences]`
    is the sequence's tree, counted from 0.
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
        """Return the nodes of the trees of these sequences, in ascending order."""
        chosen = np.zeros(len(self.leaves), bool)
        chosen[self.families[sequences]] = True
        return np.flatnonzero(chosen[self.families[self.sources]])

    def paths(self, nodes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the number of each node's path, and the nodes from the root to each of `nodes`, path by path."""
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
    """Return the trees of neighbours with the same prompt, which ends before the first trained token.

    If the prompts of neighbours differ in length, as for turns trained in another sequence, the shorter one counts.
    Tokens are shared only if their columns of inputs are equal, in prompts without those that follow them
    (`Column.follows_prompt`). A tree with more than `max_tokens`, with every node padded to `alignment`, is split into
    several. Nothing is shared if it would cost more tokens of padding, or more gathered keys, than it saves.
    """
    found = _TreeBuilder(
        max_tokens, alignment, np.zeros(len(batch.lengths), np.int64), np.zeros(len(batch.lengths), np.int64)
    )
    starts, inputs = np.cumsum(batch.lengths, dtype=np.int64) - batch.lengths, batch.of_use("input")
    for first, last, prompt in _find_alike(batch, inputs, starts):
        if last == first + 1:
            found.add(first, int(batch.lengths[first]), 0)
            continue
        rows = [_make_rows(batch, inputs, starts[i], batch.lengths[i], prompt) for i in range(first, last)]
        order = sorted(range(last - first), key=[each.tobytes() for each in rows].__getitem__)
        common = [_count_common(rows[i], rows[after]) for i, after in pairwise(order)]
        for i, shared in zip(order, [0, *_keep_worthwhile(common, alignment)], strict=True):
            found.add(first + i, len(rows[i]), shared)
    parents, sources, begins, ends = np.array(found.nodes, np.int64).T
    return PrefixTrees(parents, sources, begins, ends, found.leaves, found.families)


def _find_alike(batch: Batch, inputs: Inputs, starts: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of sequences, as first and end, with the length of their common prompt."""
    tokens, ends = batch.tokens, starts + batch.lengths
    compared = [tokens, *(values for name, values in inputs.items() if not column_of(name, values).follows_prompt)]
    trained = np.append(np.flatnonzero(batch.fields.get("loss_mask", np.empty(0)) > 0), len(tokens))
    next_trained = trained[np.searchsorted(trained, starts)]
    prompts = np.where(next_trained < ends, next_trained - starts, 0).tolist()
    first, shared = 0, prompts[0]
    for i, (start, prompt) in enumerate(zip(starts.tolist(), prompts, strict=True)):
        both, lead = min(shared, prompt), starts[first]
        if both and all(np.array_equal(each[start : start + both], each[lead : lead + both]) for each in compared):
            shared = both
        elif i:
            yield first, i, shared
            first, shared = i, prompt
    yield first, len(starts), shared


def _make_rows(batch: Batch, inputs: Inputs, start: int, length: int, prompt: int) -> NDArray[np.uint8]:
    """Return a row of bytes for each token of a sequence; tokens with equal rows have equal results and sort alike."""
    here = slice(start, start + length)
    rows = [batch.tokens[here].astype(">u4").view(np.uint8).reshape(length, 4)]
    for name, values in inputs.items():
        compared = values[here].copy()
        if column_of(name, values).follows_prompt:
            compared[:prompt] = 0
        rows.append(compared.reshape(length, -1).view(np.uint8))
    return np.concatenate(rows, 1) if len(rows) > 1 else rows[0]


def _count_common(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> int:
    """Return the number of equal leading rows."""
    n = min(len(one), len(other))
    differ = (one[:n] != other[:n]).any(1)
    return int(differ.argmax()) if differ.any() else n


def _keep_worthwhile(common: Sequence[int], alignment: int) -> list[int]:
    """Reduce the common tokens of neighbours if sharing them would cost more than it saves.

    Neighbours with equal numbers branch from one node, which saves all but one copy of its tokens. The node has its own
    padding, half the alignment on average, and gathers the keys of its path.
    """
    result = [0] * len(common)
    nodes: list[tuple[int, list[int]]] = []  # open nodes: the end of each, and the pairs that branch there
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
class _TreeBuilder:
    """A builder of trees from sequences in the order of their tokens; `path` leads to the last sequence's leaf."""

    max_tokens: int
    alignment: int
    leaves: NDArray[np.int64]
    families: NDArray[np.int64]
    nodes: list[list[int]] = field(default_factory=list)  # parent, source, start, end
    path: list[int] = field(default_factory=list)
    size: int = 0  # of the tree, padded
    family: int = -1

    def add(self, sequence: int, length: int, common: int) -> None:
        """Add a sequence that starts with `common` tokens of the last one."""
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
        """Split a node in two and return the upper one, which is new."""
        parent, source, start, _ = self.nodes[node]
        self.nodes.append([parent, source, start, at])
        self.nodes[node][0], self.nodes[node][2] = len(self.nodes) - 1, at
        return len(self.nodes) - 1

    def _pad(self, tokens: int) -> int:
        return -(-tokens // self.alignment) * self.alignment
