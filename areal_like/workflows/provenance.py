"""Compares the trajectories of a group workflow with what the servers generated for that group."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from areal_like.per_token import KeptIds, Routes, add_rows, join_kept, unknown_routes
from areal_like.rollout.sample import Response
from areal_like.types import Floats, Trajectory
from areal_like.workflows.joining import join_temperatures


class NotGenerated(Exception):
    """A trajectory has generated tokens that are not those of a response, or a response occurs twice."""


@dataclass(eq=False)
class Responses:
    """The responses that the servers generated for one group, by session; each may be trained on once.

    `version` is the weights' version when the group began. Tokens from a dataset, which have no log-probs, get it.
    """

    made: Sequence[tuple[int, Response]]
    version: int
    _unused: dict[int, list[tuple[int, Response]]] = field(init=False)
    _used: list[Response] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._unused = defaultdict(list)
        for session, response in self.made:
            if len(response.tokens):
                self._unused[int(response.tokens[0])].append((session, response))

    def claim(self, item: Trajectory) -> tuple[Trajectory, int | None]:
        """Return a trajectory with the servers' versions, and the session of its first response, None without one.

        What the servers returned per token beside log-probs never was in the process of the user's code; it is added.

        Raises NotGenerated.
        """
        from_data = item.generated & np.isnan(item.logprobs)
        claimed = [each for start, end in _runs(item.generated & ~from_data) for each in self._claim(item, start, end)]
        versions = np.where(from_data, np.int32(self.version), item.versions)
        parts = [(start, response) for start, _, response in claimed]
        routes, kept = _find_routes(parts, len(item.tokens)), _find_kept(parts, len(item.tokens))
        temperatures = _find_temperatures(parts, len(item.tokens))
        owner = next((session for _, session, _ in claimed), None)
        return replace(item, versions=versions, routes=routes, kept=kept, temperatures=temperatures), owner

    def _claim(self, item: Trajectory, start: int, end: int) -> Iterator[tuple[int, int, Response]]:
        """Yield where each response begins that a run of generated tokens consists of, its session, and it, as cut."""
        while start < end:
            same = [each for each in self._unused[int(item.tokens[start])] if _begins(item, start, end, each[1])]
            if not same:
                raise NotGenerated(self._problem(item, start, end))
            session, response = max(same, key=lambda each: (len(each[1].tokens) <= end - start, len(each[1].tokens)))
            self._unused[int(item.tokens[start])].remove((session, response))
            self._used.append(response)
            whole = response if len(response.tokens) <= end - start else response.cut(end - start)
            yield start, session, whole
            start += len(whole.tokens)

    def _problem(self, item: Trajectory, start: int, end: int) -> str:
        if any(_begins(item, start, end, response) for response in self._used if len(response.tokens)):
            return (
                f"the response at token {start} is already in the group's trajectories, and can be trained on only once"
            )
        return (
            f"its generated tokens {start} to {end - 1} are not a response to this group: tokens, log-probs and versions "
            "must be those of a response that rollout.sample or a client of rollout.recorded returned to this group"
        )


def _find_temperatures(parts: Sequence[tuple[int, Response]], tokens: int) -> Floats | None:
    spans, end = list[tuple[int, float]](), 0
    for start, response in parts:
        spans += [(start - end, 0.0), (len(response.tokens), response.temperature)]
        end = start + len(response.tokens)
    return join_temperatures([*spans, (tokens - end, 0.0)])


def _find_routes(parts: Sequence[tuple[int, Response]], tokens: int) -> Routes | None:
    rows = [response.routes for _, response in parts if response.routes is not None]
    if not rows:
        return None
    routes, filled = unknown_routes(tokens, rows[0]), 0
    for start, response in parts:
        if response.routes is not None:
            filled = add_rows(routes, response.routes, start + len(response.tokens) - 1, filled)
    return routes


def _find_kept(parts: Sequence[tuple[int, Response]], tokens: int) -> KeptIds | None:
    spans, end = list[tuple[int, KeptIds | None]](), 0
    for start, response in parts:
        spans += [(start - end, None), (len(response.tokens), response.kept)]
        end = start + len(response.tokens)
    return join_kept([*spans, (tokens - end, None)])


def _begins(item: Trajectory, start: int, end: int, response: Response) -> bool:
    """Return whether a response lies at `start`; one that was cut, as by a stop text, ends its run."""
    size = min(len(response.tokens), end - start)
    pairs = (
        (item.tokens, response.tokens),
        (item.versions, response.versions),
        (item.logprobs, response.logprobs),
    )
    return all(np.array_equal(own[start : start + size], made[:size]) for own, made in pairs)


def _runs(where: np.ndarray[tuple[int], np.dtype[np.bool]]) -> Iterator[tuple[int, int]]:
    """Yield start and end of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], where, [False]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
