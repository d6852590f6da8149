"""Credit of turns that are samples of their own: each counts once in the statistics of rewards.

The turns of an episode form one chain, in the order of its trajectories: an agent that rewrites its prompt before each
turn has a trajectory for each, and one whose conversation only grows has one trajectory.

Source: GiGPO (arXiv 2505.10978), eq. 3 to 8, for groups of turns that start in equal states.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from areal_like.core.algorithms.normalise import normalise
from areal_like.core.algorithms.settings import Settings
from areal_like.core.algorithms.types import Experience
from areal_like.core.config.schema import NormConfig
from areal_like.core.types import TURN_REWARDS, TURN_STATES, Ints

type Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class TurnRuns:
    """The turns of a step, trajectory by trajectory: runs of generated tokens.

    `ends` and `starts` are places in the batch, of the last token and the first one; `steps` are the places of `ends`
    among the generated tokens; `owner` has the trajectory of each turn. Each is `[turns]`.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    steps: NDArray[np.int64]
    owner: NDArray[np.int64]


def find_turns(experience: Experience) -> TurnRuns:
    """Return the turns of all trajectories."""
    batch = experience.batch
    places = np.flatnonzero(batch.fields["loss_mask"] > 0)
    trajectory = np.repeat(np.arange(len(batch.lengths)), batch.lengths)[places]
    first = (np.diff(places, prepend=-2) != 1) | (np.diff(trajectory, prepend=-1) != 0)
    steps = np.append(np.flatnonzero(first)[1:], len(places)) - 1
    return TurnRuns(places[first], places[steps], steps, trajectory[steps])


def credit_each_turn(experience: Experience, shaped: Doubles, settings: Settings) -> Doubles:
    """Return rewards of the generated tokens whose suffix sums are the normalised values of their turns.

    The reward of an episode (its last trajectory's in `shaped`) is added to its last turn. A turn's return is its
    reward plus the discounted return of the episode's next turn, normalised over turns. With `state_coef`, the
    advantage is instead the episode's, whose rewards are summed without a discount, plus `state_coef` times the
    advantage of the return among the turns of the group that start in the same state.
    """
    turns = find_turns(experience)
    own, groups = _own_rewards(experience, turns, shaped, settings), experience.groups[turns.owner]
    episodes = experience.samples[turns.owner]
    returns = _returns(own, episodes, settings.turn_discount)
    if settings.state_coef is None:
        worth = normalise(returns, groups, settings.reward_norm)
    else:
        totals = np.bincount(episodes, own)[episodes]
        states = (
            np.unique(np.stack([groups, _states(experience, turns)]), axis=1, return_inverse=True)[1]
            .reshape(-1)
            .astype(np.int32)
        )
        in_state = normalise(returns, states, _within_groups(settings.reward_norm))
        worth = normalise(totals, groups, settings.reward_norm) + settings.state_coef * in_state
    following = np.append(np.where(np.diff(turns.owner) == 0, worth[1:], 0), 0)
    result = np.zeros(int(turns.steps[-1]) + 1)
    result[turns.steps] = worth - following
    return result


def _within_groups(norm: NormConfig) -> NormConfig:
    levels = {key: "group" for key in ("mean_level", "std_level") if getattr(norm, key)}
    return norm.model_copy(update=levels)


def _own_rewards(experience: Experience, turns: TurnRuns, shaped: Doubles, settings: Settings) -> Doubles:
    own = np.zeros(len(turns.owner))
    if (given := experience.batch.fields.get(TURN_REWARDS)) is not None:
        own += settings.reward_scaling * given[turns.ends]
    last = _last_of(experience.samples[turns.owner])
    own[last] += shaped[turns.owner[last]]
    return own


def _last_of(episodes: Ints) -> NDArray[np.int64]:
    """Return the place of the last turn of each episode."""
    return len(episodes) - 1 - np.unique(episodes[::-1], return_index=True)[1]


def _returns(own: Doubles, episodes: Ints, discount: float) -> Doubles:
    """Return each turn's reward plus the discounted rewards of later turns of its episode."""
    result, following = own.copy(), dict[int, float]()
    for turn in range(len(own) - 1, -1, -1):
        result[turn] += discount * following.get(int(episodes[turn]), 0.0)
        following[int(episodes[turn])] = float(result[turn])
    return result


def _states(experience: Experience, turns: TurnRuns) -> NDArray[np.int64]:
    """Return a number for the state in which each turn starts: the workflow's, or else the tokens before the turn."""
    batch, numbers = experience.batch, dict[bytes | int, int]()
    named = batch.fields.get(TURN_STATES)
    begin = (np.cumsum(batch.lengths) - batch.lengths)[turns.owner]
    keys: list[bytes | int] = []
    for first, start, end in zip(begin.tolist(), turns.starts.tolist(), turns.ends.tolist(), strict=True):
        state = 0 if named is None else int(named[end])
        keys.append(state or batch.tokens[first:start].tobytes())
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
