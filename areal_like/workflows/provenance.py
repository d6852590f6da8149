"""Comparison of a group workflow's trajectories with the servers' responses for the group."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from areal_like.per_token import KeptIds, Routes, add_rows, join_kept, unknown_routes
from areal_like.rollout.response import Response
from areal_like.types import Floats, Ints, Trajectory
from areal_like.workflows.joining import join_temperatures


class NotGenerated(Exception):
    """A trajectory's generated tokens do not match a response, or a response occurs twice."""


@dataclass(frozen=True, eq=False)
class Generated:
    """A response to the tokens `prompt` in one session."""

    session: int
    prompt: Ints
    response: Response

    def begins_with(self, tokens: Ints) -> bool:
        """Return whether prompt and response start with these tokens, for example of a turn cut at a stop text."""
        return np.array_equal(np.concatenate([self.prompt, self.response.tokens])[: len(tokens)], tokens)


@dataclass(eq=False)
class Responses:
    """The servers' responses for one group; each may be trained on once.

    `version` is the weights' version at the start of the group, also for tokens from a dataset, which have no
    log-probs.
    """

    made: Sequence[Generated]
    version: int
    _unused: dict[int, list[Generated]] = field(init=False)
    _used: list[Response] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._unused = defaultdict(list)
        for each in self.made:
            if len(each.response.tokens):
                self._unused[int(each.response.tokens[0])].append(each)

    def claim(self, item: Trajectory) -> tuple[Trajectory, int | None]:
        """Return a trajectory with the servers' versions, and the session of its first response, None without one.

        Adds per-token data of the servers other than log-probs, which the user's process never had.

        Raises NotGenerated.
        """
        from_data = item.generated & np.isnan(item.logprobs)
        claimed = [each for start, end in _runs(item.generated & ~from_data) for each in self._claim(item, start, end)]
        versions = np.where(from_data, np.int32(self.version), item.versions)
        parts = [(start, response) for start, _, response in claimed]
        routes, kept = self._find_routes(claimed, item.tokens), _find_kept(parts, len(item.tokens))
        temperatures = _find_temperatures(parts, len(item.tokens))
        owner = next((session for _, session, _ in claimed), None)
        return replace(item, versions=versions, routes=routes, kept=kept, temperatures=temperatures), owner

    def _claim(self, item: Trajectory, start: int, end: int) -> Iterator[tuple[int, int, Response]]:
        """Yield start, session and (possibly cut) response for each response in a run of generated tokens."""
        while start < end:
            same = [each for each in self._unused[int(item.tokens[start])] if _begins(item, start, end, each.response)]
            if not same:
                raise NotGenerated(self._problem(item, start, end))
            made = max(same, key=lambda each: ((size := len(each.response.tokens)) <= end - start, size))
            self._unused[int(item.tokens[start])].remove(made)
            self._used.append(made.response)
            whole = made.response if len(made.response.tokens) <= end - start else made.response.cut(end - start)
            yield start, made.session, whole
            start += len(whole.tokens)

    def _find_routes(self, claimed: Sequence[tuple[int, int, Response]], tokens: Ints) -> Routes | None:
        """Return the route rows of a trajectory's tokens.

        A later turn has rows only for its new tokens. If it continues a turn that another trajectory trains, the
        earlier rows come from that turn and its predecessors.
        """
        rows = [response.routes for _, _, response in claimed if response.routes is not None]
        if not rows:
            return None
        routes, filled = unknown_routes(len(tokens), rows[0]), 0
        for start, session, response in claimed:
            if response.routes is None:
                continue
            end = start + len(response.tokens) - 1
            for place, earlier in reversed(list(self._earlier(session, tokens, end - len(response.routes), filled))):
                filled = add_rows(routes, earlier, place, filled)
            filled = add_rows(routes, response.routes, end, filled)
        return routes

    def _earlier(self, session: int, tokens: Ints, end: int, filled: int) -> Iterator[tuple[int, Routes]]:
        """Yield rows of the turns that lead to token `end`, and their ends, back to `filled`, the last turn first."""
        while end > filled:
            turns = (each for each in self.made if each.session == session)
            rows = next((rows for each in turns if (rows := _rows_until(each, tokens[: end + 1])) is not None), None)
            if rows is None or not len(rows):
                return
            yield end, rows
            end -= len(rows)

    def _problem(self, item: Trajectory, start: int, end: int) -> str:
        if any(_begins(item, start, end, response) for response in self._used if len(response.tokens)):
            return (
                f"the response at token {start} is already in the group's trajectories, and can be trained on only once"
            )
        return (
            f"its generated tokens {start} to {end - 1} are not a response to this group: tokens, log-probs and versions "
            "must be those of a response that rollout.sample or a client of rollout.record returned to this group"
        )


def _find_temperatures(parts: Sequence[tuple[int, Response]], tokens: int) -> Floats | None:
    spans, end = list[tuple[int, float]](), 0
    for start, response in parts:
        spans += [(start - end, 0.0), (len(response.tokens), response.temperature)]
        end = start + len(response.tokens)
    return join_temperatures([*spans, (tokens - end, 0.0)])


def _rows_until(made: Generated, tokens: Ints) -> Routes | None:
    """Return the rows of a response whose prompt and first tokens are `tokens`; None for another response."""
    own = len(tokens) - len(made.prompt)
    if not 0 < own <= len(made.response.tokens):
        return None
    same = np.array_equal(tokens, np.concatenate([made.prompt, made.response.tokens[:own]]))
    return made.response.cut(own).routes if same else None


def _find_kept(parts: Sequence[tuple[int, Response]], tokens: int) -> KeptIds | None:
    spans, end = list[tuple[int, KeptIds | None]](), 0
    for start, response in parts:
        spans += [(start - end, None), (len(response.tokens), response.kept)]
        end = start + len(response.tokens)
    return join_kept([*spans, (tokens - end, None)])


def _begins(item: Trajectory, start: int, end: int, response: Response) -> bool:
    """Return whether a response starts at `start`; a cut response, for example at a stop text, ends its run."""
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
