"""Compares the trajectories of a group workflow with what the servers generated for that group."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from areal_like.rollout.pool import Response
from areal_like.types import Trajectory


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

        Raises NotGenerated.
        """
        from_data = item.generated & np.isnan(item.logprobs)
        sessions = [
            session for start, end in _runs(item.generated & ~from_data) for session in self._claim(item, start, end)
        ]
        versions = np.where(from_data, np.int32(self.version), item.versions)
        return replace(item, versions=versions), next(iter(sessions), None)

    def _claim(self, item: Trajectory, start: int, end: int) -> Iterator[int]:
        """Yield the sessions of the responses that a run of generated tokens consists of."""
        while start < end:
            same = [each for each in self._unused[int(item.tokens[start])] if _begins(item, start, end, each[1])]
            if not same:
                raise NotGenerated(self._problem(item, start, end))
            session, response = max(same, key=lambda each: (len(each[1].tokens) <= end - start, len(each[1].tokens)))
            self._unused[int(item.tokens[start])].remove((session, response))
            self._used.append(response)
            start += min(len(response.tokens), end - start)
            yield session

    def _problem(self, item: Trajectory, start: int, end: int) -> str:
        if any(_begins(item, start, end, response) for response in self._used if len(response.tokens)):
            return f"the response at token {start} is in the group's trajectories already, and is trained on once"
        return (
            f"its generated tokens {start} to {end - 1} are not a response to this group: tokens, log-probs and versions "
            "have to be those of a response that rollout.sample or a client of rollout.recorded gave this group"
        )


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
