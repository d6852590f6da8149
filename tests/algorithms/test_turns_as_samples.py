"""Turns as samples of their own: advantages against plain loops over turns, weights of turns, mini-batches of turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from tolerance import assert_close

from areal_like.core.algorithms.advantages import estimate, estimate_with_signs, shape_rewards
from areal_like.core.algorithms.batch import join, minibatches, turn_mean
from areal_like.core.algorithms.settings import PRESETS, Settings
from areal_like.core.config.schema import NormConfig
from areal_like.core.types import TURN_REWARDS, TURN_STATES, FinishReason, Trajectory

IN_GROUP = NormConfig(mean_level="group", std_level="group", std_unbiased=True)
FROM_MEAN = NormConfig(mean_level="group")
OVER_BATCH = NormConfig(mean_level="group", std_level="batch", std_unbiased=True)
WHOLE = NormConfig(mean_level="batch", std_level="batch", std_unbiased=True)


@dataclass(frozen=True)
class Played:
    """A turn of an episode: prompt tokens, response tokens, its reward, and the state in which it starts."""

    prompt: tuple[int, ...]
    tokens: int
    reward: float
    state: int


type Episode = tuple[int, Sequence[Played]]  # with its group


def episodes(seed: int) -> list[Episode]:
    """Three groups of four episodes with one to four turns in four states, whose rewards often repeat."""
    random = np.random.default_rng(seed)

    def turn() -> Played:
        state = int(random.integers(1, 5))
        return Played((state, state), int(random.integers(1, 4)), float(random.integers(-1, 3)), state)

    return [(group, [turn() for _ in range(random.integers(1, 5))]) for group in range(3) for _ in range(4)]


def trajectory(group: int, sample: int, turns: Sequence[Played], *, named: bool = True) -> Trajectory:
    """Return a conversation of turns, with their rewards, and their states if they are named."""
    parts = [(turn.prompt, turn.tokens) for turn in turns]
    versions = [v for prompt, n in parts for v in [-1] * len(prompt) + [0] * n]
    tokens = [t for prompt, n in parts for t in [*prompt, *[9] * n]]
    ends = np.cumsum([len(prompt) + n for prompt, n in parts]) - 1
    rewards, states = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int64)
    rewards[ends], states[ends] = [turn.reward for turn in turns], [turn.state << 40 for turn in turns]
    arrays = np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), np.array(versions, np.int32)
    columns = {TURN_REWARDS: rewards} | ({TURN_STATES: states} if named else {})
    return Trajectory(0, group, *arrays, FinishReason.STOP, reward=0.0, sample=sample, columns=columns)


def growing(played: Sequence[Episode]) -> list[Trajectory]:
    """Each episode is one conversation."""
    return [trajectory(group, i, turns) for i, (group, turns) in enumerate(played)]


def rewritten(played: Sequence[Episode]) -> list[Trajectory]:
    """Each turn has a prompt of its own, which is the state's."""
    return [trajectory(group, i, [turn], named=False) for i, (group, turns) in enumerate(played) for turn in turns]


def advantages(items: list[Trajectory], settings: Settings) -> list[float]:
    """Return the advantage of each turn."""
    experience = join(items, 0)
    assert experience is not None
    mask = experience.batch.fields["loss_mask"] > 0
    found = np.asarray(estimate(experience, settings, 100)["advantages"])
    starts = np.flatnonzero(mask & ~np.append(False, mask[:-1]))
    assert not found[~mask].any()
    for start, end in zip(starts, [*starts[1:], len(mask)], strict=True):  # all tokens of a turn have the same one
        assert (found[start:end][mask[start:end]] == found[start]).all()
    return found[starts].tolist()


def returns(turns: Sequence[Played], discount: float) -> Iterator[float]:
    for i in range(len(turns)):
        yield sum(discount**k * turn.reward for k, turn in enumerate(turns[i:]))


def normal(values: Sequence[float], keys: Sequence[object], norm: NormConfig) -> list[float]:
    """Normalise by plain loops, as a pipeline does whose samples are turns."""
    result = []
    for value, key in zip(values, keys, strict=True):
        own = [other for other, its in zip(values, keys, strict=True) if its == key]
        sets = {"group": own, "batch": list(values)}
        mean = statistics.fmean(sets[norm.mean_level]) if norm.mean_level else 0.0
        deviation = 1.0
        if norm.std_level:
            deviation = statistics.stdev(sets[norm.std_level]) if len(sets[norm.std_level]) > 1 else 0.0
        result.append((value - mean) / deviation if deviation > 1e-6 else 0.0)
    return result


@pytest.mark.parametrize("shape", [growing, rewritten])
@pytest.mark.parametrize("norm", [NormConfig(), FROM_MEAN, IN_GROUP, OVER_BATCH, WHOLE])
@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_returns_of_turns_are_normalised_over_turns(
    shape: Callable[[Sequence[Episode]], list[Trajectory]], norm: NormConfig, discount: float
) -> None:
    played = episodes(1)
    settings = replace(PRESETS["turn_reinforce"], reward_norm=norm, turn_discount=discount)
    of_turns = [value for _, turns in played for value in returns(turns, discount)]
    groups = [group for group, turns in played for _ in turns]
    assert_close(advantages(shape(played), settings), normal(of_turns, groups, norm))


@pytest.mark.parametrize("shape", [growing, rewritten])
@pytest.mark.parametrize("norm", [FROM_MEAN, IN_GROUP])
@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_gigpo_compares_episodes_of_a_group_and_turns_from_equal_states(
    shape: Callable[[Sequence[Episode]], list[Trajectory]], norm: NormConfig, weight: float
) -> None:
    played = episodes(2)
    settings = replace(PRESETS["gigpo"], reward_norm=norm, state_coef=weight)
    groups = [group for group, turns in played for _ in turns]
    states = [(group, turn.state) for group, turns in played for turn in turns]
    totals = [sum(turn.reward for turn in turns) for _, turns in played for _ in turns]
    of_turns = [value for _, turns in played for value in returns(turns, 0.95)]
    of_episode, in_state = normal(totals, groups, norm), normal(of_turns, states, norm)
    wanted = [one + weight * other for one, other in zip(of_episode, in_state, strict=True)]
    assert_close(advantages(shape(played), settings), wanted)


def test_the_reward_of_an_episode_is_that_of_its_last_turn() -> None:
    """Two conversations of one episode, as of an agent that rewrites its prompt, share the reward 1."""
    turns = [Played((1,), 2, 0.0, 1), Played((2,), 1, 0.0, 2)]
    items = [replace(trajectory(0, 0, [turn]), reward=1.0) for turn in turns]
    settings = replace(PRESETS["turn_reinforce"], reward_norm=NormConfig(), turn_discount=0.5)
    assert advantages(items, settings) == [0.5, 1.0]


def test_turns_have_equal_weights() -> None:
    """Three turns of 1, 2 and 1 trained tokens; the last two are in neighbouring sequences without a prompt between."""
    mask, lengths = np.array([0, 1, 0, 1, 1, 1, 0], np.float32), np.array([5, 2], np.int32)
    np.testing.assert_allclose(turn_mean(mask, lengths), np.array([0, 2, 0, 1, 1, 2, 0]) * 2 / 3)
    assert turn_mean(mask, lengths) @ mask == pytest.approx(mask.sum())


def test_normalised_rewards_are_clipped() -> None:
    """One of four rewards differs: in deviations it is 3 ** 0.5 from the mean."""
    items = [replace(trajectory(0, i, [Played((1,), 1, 0.0, 1)]), reward=float(i == 0)) for i in range(4)]
    norm = NormConfig(mean_level="batch", std_level="batch", clip=1.5)
    np.testing.assert_allclose(advantages(items, Settings(reward_norm=norm)), [1.5, *[-(3**-0.5)] * 3], rtol=1e-6)


def test_a_positive_reward_counts_rewards_of_turns() -> None:
    """Rewards 0, 0.5 and -1, and turns of -1 and 2, of -1, and of 1: their sums are 1, -0.5 and 0."""
    turns = [[-1.0, 2.0], [-1.0], [1.0]]
    items = [
        replace(trajectory(0, i, [Played((1,), 1, own, 1) for own in each]), reward=reward)
        for i, (each, reward) in enumerate(zip(turns, (0.0, 0.5, -1.0), strict=True))
    ]
    experience = join(items, 0)
    assert experience is not None
    assert estimate_with_signs(experience, PRESETS["topr"], 100)["positive"].tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("rewards", "changes", "positive"),
    [
        ((1.0, 0.0, 0.4), {"reward_bias": -0.5}, [1, 0, 0]),
        ((1.0, 0.0, 0.4), {"reward_bias": 0.5}, [1, 1, 1]),
        ((0.2, 2.0, 0.4), {"reward_bias": -0.3, "reward_scaling": 5.0}, [0, 1, 1]),
        ((0.5, 1.0, -1.0), {"overlong_penalty_factor": 0.7, "overlong_tokens": 1}, [0, 1, 0]),
    ],
)
def test_topr_looks_at_the_reward_that_it_trains_on(rewards, changes, positive) -> None:
    experience = join(
        [replace(trajectory(0, i, [Played((1,), 1, 0, 1)]), reward=reward) for i, reward in enumerate(rewards)], 0
    )
    assert experience is not None
    settings = replace(PRESETS["topr"], **changes)
    fields = estimate_with_signs(experience, settings, 1)
    assert fields["positive"].tolist() == positive
    assert [value > 0 for value in shape_rewards(experience, settings, 1)] == [bool(it) for it in positive]


@pytest.mark.parametrize(("turns", "count"), [(None, 3), (1, 5), (2, 3), (5, 1), (100, 1)])
def test_turns_set_the_number_of_mini_batches(turns: int | None, count: int) -> None:
    one = Played((1,), 2, 0.0, 1)
    experience = join([trajectory(0, 0, [one, one]), trajectory(0, 1, [one]), trajectory(1, 0, [one, one])], 0)
    assert experience is not None
    assert minibatches(experience.batch, 3, turns) == count
