"""Values per token that servers may return beside log-probs: the experts that were chosen, and the ids that were kept.

Both are optional (None) everywhere. Routes are one array `[tokens, layers with experts, chosen]`, of the smallest type
that holds an expert's number; its largest value marks a token whose experts are unknown. Kept ids are lists of
different lengths, an empty one where a token was sampled from the whole vocabulary, or not sampled at all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

type Routes = NDArray[np.uint8] | NDArray[np.int16]
"""`[tokens, layers, chosen]`: row i has the experts of token i as an input, in each layer that has experts."""

MOST_EXPERTS = int(np.iinfo(np.int16).max)  # one more would be the mark of an unknown one


@dataclass(frozen=True)
class RouteShape:
    """The form in which a model's servers return routes.

    A row has `chosen` of `experts` for each of `layers`, of which those in `with_experts` have any.
    """

    layers: int
    with_experts: tuple[int, ...]
    chosen: int
    experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type that holds an expert's number and the mark of an unknown one."""
        return route_type(self.experts)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as a server sends it."""
        return self.layers * self.chosen * self.dtype.itemsize

    def read(self, data: bytes, rows: int) -> Routes:
        """Return the rows that a server sent; raise ValueError, with the reason, where they cannot be routes."""
        if len(data) != rows * self.row_bytes:
            raise ValueError(
                f"{len(data)} bytes for {rows} tokens, where {self.layers} layers and {self.chosen} experts of each "
                f"take {self.row_bytes} bytes per token as {self.dtype}"
            )
        routes = np.frombuffer(data, self.dtype).reshape(rows, self.layers, self.chosen)
        if len(self.with_experts) < self.layers:
            routes = routes[:, list(self.with_experts)]
        if not rows:
            return routes
        for number in (int(routes.min()), int(routes.max())):
            if not 0 <= number < self.experts:
                raise ValueError(f"expert {number}, where the model has experts 0 to {self.experts - 1}")
        for row in (routes[0], routes[-1]):
            if self.chosen > 1 and (np.diff(np.sort(row), axis=1) == 0).any():
                raise ValueError("the same expert twice for a token: this model's layers do not report their experts")
        return routes


def route_type(experts: int) -> np.dtype[Any]:
    """Return the smallest type that holds the number of any of `experts` experts, and the mark of an unknown one."""
    return np.dtype(np.uint8 if experts <= np.iinfo(np.uint8).max else np.int16)


def unknown_expert(dtype: np.dtype[Any]) -> int:
    """Return the mark of a token whose experts are unknown."""
    return int(np.iinfo(dtype).max)


def unknown_routes(tokens: int, like: Routes) -> Routes:
    """Return rows for tokens whose experts are unknown, of the same form as `like`."""
    return np.full((tokens, *like.shape[1:]), unknown_expert(like.dtype), like.dtype)


def known_routes(routes: Routes) -> NDArray[np.bool]:
    """Return which tokens have known experts in every layer, `[tokens]`."""
    known: NDArray[np.bool] = (routes != unknown_expert(routes.dtype)).all(axis=(1, 2))
    return known


def join_routes(parts: Sequence[tuple[int, Routes | None]]) -> Routes | None:
    """Join the routes of sequences, each with its number of tokens; None where no sequence has any."""
    known = next((routes for _, routes in parts if routes is not None), None)
    if known is None:
        return None
    return np.concatenate([unknown_routes(n, known) if routes is None else routes for n, routes in parts])


def add_rows(routes: Routes, rows: Routes, end: int, filled: int) -> int:
    """Write the rows of a response, the last of which is that of token `end - 1`; return where the next ones begin.

    Rows before `filled` are known from earlier turns, and stay: they are those that their tokens were computed with.
    """
    first = max(end - len(rows), filled, 0)
    if first < end:
        routes[first:end] = rows[len(rows) - (end - first) :]
    return max(filled, end)


@dataclass(frozen=True)
class KeptIds:
    """A list of token ids for each token: list i is `ids[ends[i] : ends[i + 1]]`.

    `ids` is int32 and flat, `ends` int64 `[lists + 1]`, and begins with 0.
    """

    ids: NDArray[np.int32]
    ends: NDArray[np.int64]

    @classmethod
    def from_lists(cls, lists: Iterable[Sequence[int]]) -> Self:
        """Return these lists."""
        known = list(lists)
        ends = _ends([len(each) for each in known])
        return cls(np.fromiter(chain.from_iterable(known), np.int32, ends[-1]), ends)

    @classmethod
    def none(cls, tokens: int) -> Self:
        """Return empty lists for as many tokens."""
        return cls(np.empty(0, np.int32), np.zeros(tokens + 1, np.int64))

    @classmethod
    def join(cls, parts: Sequence["KeptIds"]) -> Self:
        """Return the lists of the parts one after the other."""
        ids = np.concatenate([np.empty(0, np.int32), *(part.ids for part in parts)])
        return cls(ids, _ends(np.concatenate([np.empty(0, np.int64), *(part.counts for part in parts)])))

    def __len__(self) -> int:
        return len(self.ends) - 1

    @property
    def counts(self) -> NDArray[np.int64]:
        """Lengths of the lists, `[lists]`."""
        return np.diff(self.ends)

    def cut(self, start: int, end: int) -> Self:
        """Return the lists from `start` to before `end`."""
        ends = self.ends[start : end + 1]
        return type(self)(self.ids[ends[0] : ends[-1]], ends - ends[0])

    def take(self, places: NDArray[np.int64] | NDArray[np.bool]) -> Self:
        """Return the lists at some places, in that order, or where a mask is true."""
        chosen = np.flatnonzero(places) if places.dtype == bool else places
        counts = self.counts[chosen]
        ends = _ends(counts)
        within = np.arange(ends[-1]) - np.repeat(ends[:-1], counts)
        return type(self)(self.ids[np.repeat(self.ends[chosen], counts) + within], ends)

    def as_rows(self) -> NDArray[np.int32]:
        """Return the lists as rows of one width, at least 1, filled up with -1: `[lists, width]`."""
        counts = self.counts
        rows = np.full((len(counts), max(1, int(counts.max(initial=0)))), -1, np.int32)
        rows[np.arange(rows.shape[1]) < counts[:, None]] = self.ids
        return rows


def _ends(counts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(counts, np.int64))])


def join_kept(parts: Sequence[tuple[int, KeptIds | None]]) -> KeptIds | None:
    """Join the kept ids of sequences, each with its number of tokens; None where no sequence has any."""
    if all(kept is None for _, kept in parts):
        return None
    return KeptIds.join([KeptIds.none(n) if kept is None else kept for n, kept in parts])
