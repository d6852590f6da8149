"""Comparison of a group workflow's trajectories with the servers' responses for the group."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from areal_like.core.columns import Values
from areal_like.core.rollout.joining import as_response, join_columns
from areal_like.core.rollout.sample import Response
from areal_like.core.types import Ints, Trajectory


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


class Responses:
    """The servers' responses for one group; each may be trained on once.

    `version` is the weights' version at the start of the group, also for tokens from a dataset, which have no
    log-probs.
    """

    def __init__(self, made: Sequence[Generated], version: int) -> None:
        self._made, self._version = made, version
        self._unused = defaultdict[int, list[Generated]](list)
        self._used: list[Response] = []
        for each in made:
            if len(each.response.tokens):
                self._unused[int(each.response.tokens[0])].append(each)

    def claim(self, item: Trajectory) -> tuple[Trajectory, int | None]:
        """Return a trajectory with the servers' versions, and the session of its first response, None without one.

        Adds the servers' columns, which the user's process never had.

        Raises NotGenerated.
        """
        from_data = item.generated & np.isnan(item.logprobs)
        claimed = [each for start, end in _runs(item.generated & ~from_data) for each in self._claim(item, start, end)]
        versions = np.where(from_data, np.int32(self._version), item.versions)
        owner = next((session for _, session, _ in claimed), None)
        return replace(item, versions=versions, columns=self._find_columns(claimed, item.tokens)), owner

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

    def _find_columns(self, claimed: Sequence[tuple[int, int, Response]], tokens: Ints) -> dict[str, Any]:
        """Return the columns of a trajectory's tokens.

        A later turn has columns of inputs only for its new tokens. If it continues a turn that another trajectory
        trains, the earlier rows come from that turn and its predecessors.
        """
        parts, end = list[Response](), 0
        for start, session, response in claimed:
            gap, known, end = as_response(tokens[end:start]), end - 1, start + len(response.tokens)
            whole = {
                name: self._lead_to(name, rows, session, tokens[: end - 1], known)
                for name, rows in response.inputs.items()
            }
            parts += [gap, replace(response, inputs=whole)]
        return join_columns([*parts, as_response(tokens[end:])])

    def _lead_to(self, name: str, rows: Values, session: int, tokens: Ints, known: int) -> Values:
        """Return the last rows of tokens, after the rows of the turns that lead to them, back to token `known`."""
        found: list[Any] = [rows]
        while (end := len(tokens) - sum(map(len, found))) > max(known, 0):
            turns = (each for each in self._made if each.session == session)
            earlier = (_rows_until(name, each, tokens[: end + 1]) for each in turns)
            before = next((each for each in earlier if each is not None), None)
            if before is None or not len(before):
                break
            found.insert(0, before)
        return np.concatenate(found)

    def _problem(self, item: Trajectory, start: int, end: int) -> str:
        if any(_begins(item, start, end, response) for response in self._used if len(response.tokens)):
            return (
                f"the response at token {start} is already in the group's trajectories, and can be trained on only once"
            )
        return (
            f"its generated tokens {start} to {end - 1} are not a response to this group: tokens, log-probs and versions "
            "must be those of a response that rollout.sample or a client of rollout.record returned to this group"
        )


def _rows_until(name: str, made: Generated, tokens: Ints) -> Values | None:
    """Return the rows of a response whose prompt and first tokens are `tokens`; None for another response."""
    own = len(tokens) - len(made.prompt)
    if not 0 < own <= len(made.response.tokens):
        return None
    same = np.array_equal(tokens, np.concatenate([made.prompt, made.response.tokens[:own]]))
    return made.response.cut(own).inputs.get(name) if same else None


def _begins(item: Trajectory, start: int, end: int, response: Response) -> bool:
    """Return whether a response starts at `start`; a cut response, for example at a stop text, ends its run."""
    size = min(len(response.tokens), end - start)
    pairs = ((item.tokens, response.tokens), (item.versions, response.versions), (item.logprobs, response.logprobs))
    return all(np.array_equal(own[start : start + size], made[:size]) for own, made in pairs)


def _runs(where: np.ndarray[tuple[int], np.dtype[np.bool]]) -> Iterator[tuple[int, int]]:
    """Yield start and end of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], where, [False]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
