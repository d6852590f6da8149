"""Advantages on numbers that can be checked by hand, and what holds for all numbers."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tolerance import assert_close

from areal_like.core.algorithms.advantages import estimate, gae, normalise, overlong_penalty
from areal_like.core.algorithms.batch import policy_batches
from areal_like.core.algorithms.losses import decoupled_ppo, divergence
from areal_like.core.algorithms.settings import (
    FROM_GROUP_MEAN,
    IN_BATCH,
    IN_GROUP,
    LEFT_OUT,
    NOTHING,
    PRESETS,
    Settings,
)
from areal_like.core.algorithms.types import Algorithm, Experience
from areal_like.core.config.schema import NormConfig
from areal_like.core.types import Batch, LossSpec


def norm_of(rewards, groups, norm=IN_GROUP):
    return normalise(np.asarray(rewards, np.float32), np.asarray(groups, np.int32), norm)


def test_a_group_is_normalised_by_its_own_mean_and_deviation():
    np.testing.assert_allclose(norm_of([1, 0, 1, 0], [7, 7, 7, 7]), [1, -1, 1, -1])
    np.testing.assert_allclose(norm_of([1, 0, 5, 3], [0, 0, 1, 1]), [1, -1, 1, -1])


def test_groups_are_found_by_id_not_by_position():
    np.testing.assert_allclose(norm_of([1, 5, 0, 3], [0, 1, 0, 1]), [1, 1, -1, -1])


def test_dr_grpo_does_not_divide():
    """Group 0 has mean 0.25, group 1 mean 4."""
    np.testing.assert_allclose(
        norm_of([1, 0, 0, 0, 5, 3], [0, 0, 0, 0, 1, 1], FROM_GROUP_MEAN), [0.75, -0.25, -0.25, -0.25, 1, -1]
    )


def test_rloo_compares_with_the_mean_of_the_others():
    """1 - mean(0, 0.5) = 0.75, 0 - mean(1, 0.5) = -0.75, 0.5 - mean(1, 0) = 0; a lone one has no others."""
    np.testing.assert_allclose(norm_of([1, 0, 0.5, 9], [0, 0, 0, 1], LEFT_OUT), [0.75, -0.75, 0, 0])


def test_the_levels_of_mean_and_deviation_may_differ():
    """Distances from the groups' means are 1, -1, 3, -3; the rewards' own deviation is that of 2, 0, 6, 0: sqrt(6)."""
    levels = NormConfig(mean_level="group", std_level="batch")
    np.testing.assert_allclose(
        norm_of([2, 0, 6, 0], [0, 0, 1, 1], levels), np.array([1, -1, 3, -3]) / np.sqrt(6), rtol=1e-6
    )
    np.testing.assert_allclose(norm_of([1, 2, 3, 6], [0, 0, 1, 1], NormConfig(mean_level="batch")), [-2, -1, 0, 3])
    np.testing.assert_allclose(norm_of([1, 2], [0, 0], NOTHING), [1, 2])


def test_an_episode_counts_once_however_many_conversations_it_has():
    """One episode of 20 conversations is right, three of one are wrong: the mean of the rewards is 1/4, not 20/23."""
    rewards, groups, samples = [1.0] * 20 + [0.0] * 3, [7] * 23, [0] * 20 + [1, 2, 3]
    unbiased = IN_GROUP.model_copy(update={"std_unbiased": True})
    for norm, right, wrong in (
        (FROM_GROUP_MEAN, 0.75, -0.25),
        (LEFT_OUT, 1, -1 / 3),  # less the mean of the three others, and of 1, 0 and 0
        (IN_GROUP, 0.75 / np.sqrt(3 / 16), -0.25 / np.sqrt(3 / 16)),
        (unbiased, 1.5, -0.5),
        (IN_BATCH, 0.75 / np.sqrt(3 / 16), -0.25 / np.sqrt(3 / 16)),
    ):
        values = normalise(np.array(rewards), np.array(groups), norm, np.array(samples))
        np.testing.assert_allclose(values, [right] * 20 + [wrong] * 3, rtol=1e-6)


def test_a_sample_of_several_rewards_counts_by_their_mean():
    """Two agents of one episode have 1 and 0, the other episode's one has 0: the episodes' means are 1/2 and 0."""
    rewards, samples = np.array([1.0, 0.0, 0.0]), np.array([4, 4, 9])
    for norm, expected in ((FROM_GROUP_MEAN, [0.75, -0.25, -0.25]), (LEFT_OUT, [1, 0, -0.5])):
        np.testing.assert_allclose(normalise(rewards, np.zeros(3, np.int32), norm, samples), expected)


@given(
    st.lists(st.tuples(st.floats(-9, 9, width=32), st.integers(0, 2), st.integers(1, 5)), min_size=1, max_size=9),
    st.sampled_from([IN_GROUP, FROM_GROUP_MEAN, LEFT_OUT, IN_BATCH]),
)
def test_conversations_of_equal_reward_change_no_value(episodes, norm):
    rewards, groups, times = (np.array(column) for column in zip(*episodes, strict=True))
    samples = np.repeat(np.arange(len(rewards)), times)
    several = normalise(np.repeat(rewards, times), np.repeat(groups, times), norm, samples)
    assert_close(several, np.repeat(normalise(rewards, groups, norm), times))


def test_an_unbiased_deviation_divides_by_one_less():
    """Of 1, 0, 0, 0 the squared distances add up to 0.75: the deviation is 0.5, not sqrt(0.75) / 2."""
    unbiased = IN_GROUP.model_copy(update={"std_unbiased": True})
    np.testing.assert_allclose(norm_of([1, 0, 0, 0], [0] * 4, unbiased), [1.5, -0.5, -0.5, -0.5])
    assert not norm_of([1.0], [0], unbiased).any()


@given(st.lists(st.tuples(st.floats(-100, 100, width=32), st.integers(0, 3)), min_size=1, max_size=20))
def test_incomplete_groups_never_blow_values_up(pairs):
    rewards, groups = zip(*pairs, strict=True)
    result = norm_of(rewards, groups)
    for group in set(groups):
        member = np.asarray(groups) == group
        assert np.abs(result[member]).max() <= np.sqrt(max(member.sum() - 1, 0)) + 1e-3
        assert abs(result[member].sum()) < 1e-2 * member.sum()


@given(
    st.lists(st.tuples(st.floats(-9, 9, width=32), st.integers(0, 3)), min_size=1, max_size=20),
    st.floats(-9, 9, width=32),
)
def test_a_baseline_takes_away_what_all_rewards_have_in_common(pairs, shift):
    rewards, groups = (np.asarray(column) for column in zip(*pairs, strict=True))
    for norm in (FROM_GROUP_MEAN, LEFT_OUT):
        assert_close(norm_of(rewards + shift, groups, norm), norm_of(rewards, groups, norm))


def test_a_lone_or_unanimous_group_teaches_nothing():
    assert not norm_of([1.0], [0]).any()
    assert not norm_of([0.1, 0.1, 0.1], [0, 0, 0]).any()


def test_gae_by_hand():
    """Rewards 0, 1, values 0.5, 0.25, γ 0.9, λ 0.8: δ = -0.275, 0.75, so A[1] = 0.75, A[0] = -0.275 + 0.72 * 0.75.

    The second episode is one step, of reward 2 and value 0.5.
    """
    result = gae(np.array([0, 1, 2.0]), np.array([0.5, 0.25, 0.5]), np.array([2, 1]), 0.9, 0.8)
    np.testing.assert_allclose(result, [0.265, 0.75, 1.5])


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    discount=st.floats(0.5, 1),
    decay=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_gae_is_the_recursion_of_every_episode(lengths, discount, decay, seed):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, sum(lengths)))
    result = gae(rewards, values, np.array(lengths), discount, decay)
    start = 0
    for length in lengths:
        later_advantage = later_value = 0.0
        for step in reversed(range(start, start + length)):
            delta = rewards[step] + discount * later_value - values[step]
            later_advantage = delta + discount * decay * later_advantage
            later_value = values[step]
            assert result[step] == pytest.approx(later_advantage)
        start += length


def test_overlong_responses_lose_up_to_the_factor():
    """DAPO's eq. 13 with 20 tokens at most, of which 4 are the tail."""
    np.testing.assert_allclose(overlong_penalty(np.array([5, 16, 17, 19, 20]), 20, 4, 2.0), [0, 0, 0.5, 1.5, 2])


def test_estimators_of_the_divergence():
    """A token that the policy thinks twice as likely as the reference: x = log 2, and exp(-x) - 1 + x."""
    x = np.log(2.0)
    assert divergence(x, "k1") == pytest.approx(x)
    assert divergence(x, "k2") == pytest.approx(x * x / 2)
    assert divergence(x, "k3") == pytest.approx(x - 0.5)


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=5), st.lists(st.floats(0.01, 1), min_size=5, max_size=5))
def test_k1_and_k3_are_right_on_average_and_k2_and_k3_never_negative(policy, reference):
    p = np.array(policy) / sum(policy)
    q = np.array(reference[: len(p)]) / sum(reference[: len(p)])
    exact, x = (p * np.log(p / q)).sum(), np.log(p / q)
    assert (p * divergence(x, "k1")).sum() == pytest.approx(exact, abs=1e-9)
    assert (p * divergence(x, "k3")).sum() == pytest.approx(exact, abs=1e-9)
    assert divergence(x, "k2").min() >= 0 and divergence(x, "k3").min() >= -1e-12


def experience(rewards=(1.0, 0.0), groups=(0, 0), lengths=(3, 4), mask=(0, 1, 1, 0, 1, 0, 1), **fields):
    """Two trajectories of two generated tokens each; in the second a tool's output lies between them."""
    arrays = {name: np.array(values, np.float32) for name, values in {"loss_mask": mask, **fields}.items()}
    batch = Batch(np.array(lengths, np.int32), np.zeros(sum(lengths), np.int32), arrays)
    samples = np.arange(len(rewards), dtype=np.int32)
    return Experience(
        np.array(rewards, np.float32), np.array(groups, np.int32), samples, batch, np.zeros(len(rewards), bool)
    )


def test_rewards_are_shifted_scaled_and_clipped_before_their_norm():
    """Rewards 1, 0, 4 with bias -0.5 and factor 10 are 5, -5, 35, and 20 at most."""
    own = Settings(reward_bias=-0.5, reward_scaling=10, reward_clip=20)
    three = experience((1.0, 0.0, 4.0), (0, 0, 0), (2, 2, 2), (0, 1, 0, 1, 0, 1))
    np.testing.assert_allclose(estimate(three, own, 9)["advantages"], [5, -5, 20])
    centred = replace(own, reward_norm=FROM_GROUP_MEAN)
    np.testing.assert_allclose(estimate(three, centred, 9)["advantages"], np.array([5, -5, 20]) - 20 / 3, rtol=1e-6)


def test_advantages_are_clipped_after_their_norm():
    own = Settings(advantage_clip=0.4)
    assert estimate(experience(), own, 9)["advantages"].tolist() == pytest.approx([0.4, 0])
    per_token = estimate(experience(), replace(PRESETS["reinforce_pp"], advantage_clip=0.4), 9)["advantages"]
    np.testing.assert_allclose(per_token, [0, 0.4, 0.4, 0, -0.4, 0, -0.4])


def masked_experience(*truncated: int):
    """Two groups of two: lengths 2, 4 and 2, 2, and mean rewards 0.5 and 1."""
    four = experience((1.0, 0.0, 1.0, 1.0), (5, 5, 2, 2), (2, 4, 2, 2), (0, 1, 0, 1, 1, 1, 0, 1, 0, 1))
    return replace(four, truncated=np.isin(np.arange(4), truncated))


def test_truncated_responses_are_not_trained_on_but_count_in_their_group():
    found = estimate(masked_experience(1), replace(PRESETS["grpo"], mask_truncated=True), 3)
    assert found["advantages"].tolist() == [1, -1, 0, 0]
    assert found["loss_mask"].tolist() == [1, 0, 1, 1]
    assert estimate(masked_experience(), replace(PRESETS["grpo"], mask_truncated=True), 1)["loss_mask"].all()


@pytest.mark.parametrize(
    ("bounds", "wanted"),
    [
        ({"group_reward_above": 0.5}, [0, 0, 1, 1]),  # equal to the bound is out
        ({"group_reward_above": 0.1, "group_reward_below": 1.0}, [1, 1, 0, 0]),
        ({"group_reward_below": 1.1}, [1, 1, 1, 1]),
        ({"group_reward_above": 2.0}, [0, 0, 0, 0]),
    ],
)
def test_groups_are_trained_on_whose_mean_reward_is_between_the_bounds(bounds, wanted):
    own = replace(PRESETS["grpo"], reward_bias=7.0, **bounds)  # which the bounds do not see
    assert estimate(masked_experience(), own, 9)["loss_mask"].tolist() == wanted


def test_a_sample_counts_once_in_the_mean_that_selects_its_group():
    """Sample 0 has three trajectories with reward 1, sample 1 one with 0: the mean is 0.5, not 0.75."""
    four = experience((1.0, 1.0, 1.0, 0.0), (0, 0, 0, 0), (1, 1, 1, 1), (1, 1, 1, 1))
    several = replace(four, samples=np.array([0, 0, 0, 1], np.int32))
    own = Settings(group_reward_below=0.6)
    assert estimate(several, own, 9)["loss_mask"].tolist() == [1, 1, 1, 1]
    assert estimate(four, own, 9)["loss_mask"].tolist() == [0, 0, 0, 0]


def test_advantages_are_normalised_over_the_tokens_that_are_trained_on():
    """The tokens that are left have rewards 1, 1, 1, whose deviation is 0; those of the masked response have 0."""
    own = replace(PRESETS["reinforce_pp"], mask_truncated=True)
    found = estimate(masked_experience(1), own, 3)
    assert found["advantages"].tolist() == [0] * 10
    assert np.abs(estimate(masked_experience(), own, 9)["advantages"]).max() > 0
    none_left = estimate(masked_experience(0, 1, 2, 3), own, 1)
    assert not none_left["advantages"].any()
    assert not none_left["loss_mask"].any()


def test_no_batch_has_responses_that_are_not_trained_on():
    own = replace(PRESETS["grpo"], mask_truncated=True)
    algorithm = Algorithm(partial(estimate, settings=own, longest=3), LossSpec(decoupled_ppo, own))
    batches = policy_batches(algorithm, masked_experience(1), 1)
    assert [batch.lengths.tolist() for batch in batches] == [[2, 2, 2]]


def test_without_critic_and_divergence_all_tokens_of_a_trajectory_have_its_reward():
    assert estimate(experience(), PRESETS["grpo"], 9)["advantages"].tolist() == [1, -1]
    assert estimate(experience(), PRESETS["rloo"], 9)["advantages"].tolist() == [1, -1]
    assert estimate(experience(), PRESETS["dr_grpo"], 9)["advantages"].tolist() == [0.5, -0.5]


def test_reinforce_pp_normalises_over_all_tokens():
    """Rewards to go 1, 1, 0, 0 have mean and deviation 0.5."""
    fields = estimate(experience(), PRESETS["reinforce_pp"], 9)
    np.testing.assert_allclose(fields["advantages"], [0, 1, 1, 0, -1, 0, -1])


def test_the_divergence_from_the_reference_is_a_cost_of_each_token():
    """β 0.1 and k1: the first trajectory's tokens cost 0.1 * (-1 + 2) = 0.1 and 0.1 * (-1 + 3) = 0.2."""
    given = experience(
        behaviour_logprobs=[0, -1, -1, 0, -1, 0, -1], reference_logprobs=[0, -2, -3, 0, -1, 0, -1], lengths=(3, 4)
    )
    fields = estimate(given, Settings(kl_ctl=0.1), 9)
    np.testing.assert_allclose(fields["advantages"], [0, 1 - 0.2 - 0.1, 1 - 0.2, 0, 0, 0, 0], rtol=1e-6)
    squared = estimate(given, Settings(kl_ctl=0.1, kl_estimator="k2"), 9)
    np.testing.assert_allclose(squared["advantages"], [0, 1 - 0.2 - 0.05, 1 - 0.2, 0, 0, 0, 0], rtol=1e-6)


TWO_TURNS = {"tokens": 12, "mask": [0, 1, 1, 0, 1, 0, 1, 1, 1, 0, 0, 1]}  # of two trajectories, with a tool between


def played(rewards: list[float], turns: list[float] | None = None) -> Experience:
    """Two trajectories of one group with two turns each; `turns` are the rewards of the four."""
    mask = np.array(TWO_TURNS["mask"], np.float32)
    fields = {"loss_mask": mask, "behaviour_logprobs": -mask}
    if turns is not None:
        fields["turn_rewards"] = np.zeros(12, np.float32)
        fields["turn_rewards"][[2, 4, 8, 11]] = turns
    batch = Batch(np.array([5, 7], np.int32), np.zeros(12, np.int32), fields)
    return Experience(
        np.array(rewards, np.float32), np.zeros(2, np.int32), np.arange(2, dtype=np.int32), batch, np.zeros(2, bool)
    )


def of_turns(fields):
    """The advantage of each turn, whose tokens have the same one."""
    own = fields["advantages"]
    assert (own[[1, 6, 7]] == own[[2, 7, 8]]).all() and not own[[0, 3, 5, 9, 10]].any()
    return own[[2, 4, 8, 11]]


def test_a_turn_has_its_own_reward_and_those_after_it():
    given = played([1, 0], turns=[0, 2, 4, 0])
    np.testing.assert_allclose(of_turns(estimate(given, Settings(), 9)), [3, 3, 4, 0])
    np.testing.assert_allclose(of_turns(estimate(given, Settings(turn_discount=0.5), 9)), [1.5, 3, 4, 0])


def test_an_earlier_turn_has_less_of_the_reward_of_an_episode():
    np.testing.assert_allclose(of_turns(estimate(played([1, 0]), Settings(turn_discount=0.5), 9)), [0.5, 1, 0, 0])


def test_a_sample_counts_once_in_the_baseline_of_its_turns():
    """Returns 3, 3 and 4, 0: samples of 3 and 2, so the mean is 2.5."""
    centred = estimate(played([1, 0], turns=[0, 2, 4, 0]), Settings(reward_norm=FROM_GROUP_MEAN), 9)
    np.testing.assert_allclose(of_turns(centred), [0.5, 0.5, 1.5, -2.5])


def test_without_rewards_of_turns_the_way_by_turns_changes_nothing():
    plain = estimate(played([1, 0]), PRESETS["grpo"], 9)["advantages"]
    by_turn = estimate(played([1, 0], turns=[0, 0, 0, 0]), PRESETS["grpo"], 9)
    np.testing.assert_allclose(of_turns(by_turn), plain[[0, 0, 1, 1]], rtol=1e-6)


def test_a_critic_s_returns_have_the_rewards_of_turns():
    given = played([1, 0], turns=[0, 2, 4, 0])
    given.batch.fields["values"] = np.zeros(12, np.float32)
    settings = replace(PRESETS["ppo"], adv_norm=NOTHING)
    np.testing.assert_allclose(estimate(given, settings, 9)["returns"][[2, 4, 8, 11]], [3, 3, 4, 0])


def test_distillation_rewards_each_token_with_the_teachers_log_ratio_alone():
    """What the teacher likes less than the policy does is discouraged at this token, whatever the reward is."""
    given = experience(
        behaviour_logprobs=[0, -1, -1, 0, -1, 0, -1], teacher_logprobs=[0, -3, -0.5, 0, -1, 0, 0], lengths=(3, 4)
    )
    plain = replace(PRESETS["distill"], adv_norm=NOTHING)
    np.testing.assert_allclose(estimate(given, plain, 9)["advantages"], [0, -2, 0.5, 0, 0, 0, 1])
    centred = estimate(given, PRESETS["distill"], 9)["advantages"]
    np.testing.assert_allclose(centred[[1, 2, 4, 6]], np.array([-2, 0.5, 0, 1]) + 0.125)
    mixed = estimate(given, replace(PRESETS["grpo"], teacher_coef=0.1), 9)["advantages"]
    np.testing.assert_allclose(mixed, [0, 1 - 0.2, 1 + 0.05, 0, -1, 0, -1 + 0.1], rtol=1e-6)
    weighted = estimate(given, replace(plain, reward_coef=0.5), 9)["advantages"]
    np.testing.assert_allclose(weighted, [0, 0.5 - 2, 0.5 + 0.5, 0, -0.5, 0, -0.5 + 1], rtol=1e-6)


def test_a_token_that_a_teacher_excludes_is_discouraged_as_much_as_float32_can_say():
    """A probability of 0 counts as the least that float32 holds: no advantage is infinite, nor undefined after it."""
    given = experience(
        behaviour_logprobs=[0, -1, -1, 0, -1, 0, -1], teacher_logprobs=[0, -np.inf, -0.5, 0, -1, 0, 0], lengths=(3, 4)
    )
    plain = replace(PRESETS["distill"], adv_norm=NOTHING)
    least = np.log(np.nextafter(np.float32(0), np.float32(1), dtype=np.float32).astype(np.float64))
    np.testing.assert_allclose(estimate(given, plain, 9)["advantages"], [0, least + 1, 0.5, 0, 0, 0, 1], rtol=1e-4)
    assert np.isfinite(estimate(given, PRESETS["distill"], 9)["advantages"]).all()


def test_with_discount_an_earlier_token_has_less_of_the_reward():
    fields = estimate(experience(), Settings(discount=0.5), 9)
    np.testing.assert_allclose(fields["advantages"], [0, 0.5, 1, 0, 0, 0, 0])


def test_ppo_s_advantages_and_returns():
    """Values 0.5, 0.25 and 0.25, 0.75 at the generated tokens, λ 0: A = δ = V' - V, then the reward - V; R = A + V."""
    given = experience(values=[9, 0.5, 0.25, 9, 0.25, 9, 0.75])
    fields = estimate(given, replace(PRESETS["ppo"], gae_lambda=0.0, adv_norm=NOTHING), 9)
    np.testing.assert_allclose(fields["advantages"], [0, -0.25, 0.75, 0, 0.5, 0, -0.75])
    np.testing.assert_allclose(fields["returns"], [0, 0.25, 1, 0, 0.75, 0, 0])
    whitened = estimate(given, replace(PRESETS["ppo"], gae_lambda=0.0), 9)
    np.testing.assert_allclose(whitened["returns"], fields["returns"])
    own = np.array([-0.25, 0.75, 0.5, -0.75])
    np.testing.assert_allclose(whitened["advantages"][[1, 2, 4, 6]], (own - own.mean()) / own.std(), rtol=1e-6)


def test_overlong_responses_are_penalised_before_the_group_is_compared():
    """Three tokens at most, the last is the tail: both have 2 and lose nothing; of at most two both lose 1."""
    shaped = Settings(overlong_penalty_factor=1.0, overlong_tokens=1)
    assert estimate(experience(), shaped, 3)["advantages"].tolist() == [1, 0]
    assert estimate(experience(), shaped, 2)["advantages"].tolist() == [0, -1]


def test_settings_of_an_advantage_s_level():
    """In two groups, whitened over all tokens."""
    given = experience(groups=(0, 1))
    assert not estimate(given, Settings(adv_norm=IN_GROUP), 9)["advantages"].any()
    assert estimate(given, Settings(adv_norm=IN_BATCH), 9)["advantages"].any()
