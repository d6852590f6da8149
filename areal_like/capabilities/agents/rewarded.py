"""The return value of an episode as a reward, and the failure of an episode."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from areal_like.rewards.functions import VALUE, as_reward
from areal_like.runtime.user_code import UserCodeError
from areal_like.types import Reward

STATES = "states"  # key of a dict with a list of texts or whole numbers, which name the states in which turns start
TURNS = "turns"  # key of a dict with a list of rewards of turns; their sum is recorded under this name


class EpisodeError(Exception):
    """A failed episode: `cause` is the counted category, the message has the details."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


def reward_of(returned: Any) -> Reward:
    """Convert an episode's return value to a reward; raises EpisodeError."""
    if returned is None:
        return Reward(None)
    try:
        if isinstance(returned, Reward):  # as from the run's own score
            return Reward(reward_of(returned.value).value, as_reward({**returned.parts, VALUE: 0}, "it").parts)
        if isinstance(returned, Mapping) and any(
            isinstance(returned.get(key), list | tuple) for key in (TURNS, STATES)
        ):
            return _with_turns(returned)
        return as_reward(returned, "it")
    except TypeError as error:
        raise EpisodeError("not a reward", f"the parts of a reward must be a dict of numbers: {error}") from error
    except UserCodeError as error:
        raise EpisodeError("not a reward", f"{error}, nor None") from error


def _with_turns(returned: Mapping[Any, Any]) -> Reward:
    turns = tuple(float(as_reward(reward, "it").value or 0) for reward in returned.get(TURNS, ()))
    own = as_reward({key: value for key, value in returned.items() if key not in (TURNS, STATES)}, "it")
    parts = {**own.parts, TURNS: sum(turns)} if TURNS in returned else own.parts
    return replace(own, parts=parts, turns=turns, states=tuple(map(_state_number, returned.get(STATES, ()))))


def _state_number(state: Any) -> int:
    """Return a positive number of 48 bits for a state's name; raises EpisodeError."""
    if not isinstance(state, str | int) or isinstance(state, bool):
        raise EpisodeError("not a reward", f"a state is {state!r:.80}, neither a text nor a whole number")
    digest = hashlib.blake2b(f"{type(state).__name__} {state}".encode(), digest_size=6).digest()
    return int.from_bytes(digest) + 1
