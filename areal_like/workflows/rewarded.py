"""What an episode returned, as a reward, and how an episode fails."""

from typing import Any

from areal_like.rewards.functions import VALUE, as_reward
from areal_like.runtime.user_code import UserCodeError
from areal_like.types import Reward


class EpisodeError(Exception):
    """An episode failed: `cause` is a word that is counted, the message says more."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


def reward_of(returned: Any) -> Reward:
    """Return what an episode returned as a reward; raises EpisodeError."""
    if returned is None:
        return Reward(None)
    try:
        if isinstance(returned, Reward):  # as the run's own score gives them
            return Reward(reward_of(returned.value).value, as_reward({**returned.parts, VALUE: 0}, "it").parts)
        return as_reward(returned, "it")
    except TypeError as error:
        raise EpisodeError("not a reward", f"the parts of a reward are a dict of numbers: {error}") from error
    except UserCodeError as error:
        raise EpisodeError("not a reward", f"{error}, nor None") from error
