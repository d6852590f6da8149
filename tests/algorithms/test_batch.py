"""Trajectories to batches, on numbers that can be checked by hand."""

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from areal_like.core.algorithms.batch import (
    constant_length,
    join,
    number_samples,
    policy_batches,
    sequence_mean,
    supervised_batch,
)
from areal_like.core.algorithms.presets import make_algorithm
from areal_like.core.config.schema import RunConfig
from areal_like.core.types import TEACHER_IDS, TEACHER_LOGPROBS, TEACHER_TOP, Batch, FinishReason, Trajectory

RUN = {"experiment_name": "a", "train_dataset": {"path": "b"}, "actor": {"path": "c"}}
GRPO = make_algorithm(RunConfig.model_validate(RUN))


def batches(algorithm, trajectories, version, n=1):
    return policy_batches(algorithm, join(trajectories, version), n)


SAMPLES = itertools.count()


def trajectory(versions, reward, group=0):
    """Tokens 0, 1, ... with log-probs -0.0, -0.5, -1.0, ... where they were generated."""
    n = len(versions)
    logprobs = np.where(np.array(versions) >= 0, -0.5 * np.arange(n), 0).astype(np.float32)
    tokens, made = np.arange(n, dtype=np.int32), np.array(versions, np.int32)
    return Trajectory(0, group, tokens, logprobs, made, FinishReason.STOP, reward, sample=next(SAMPLES))


def test_a_worked_example():
    """Two samples of a group, rewards 1 and 0, so advantages 1 and -1; trained at version 3."""
    (batch,) = batches(GRPO, [trajectory([-1, -1, 2, 3], 1.0), trajectory([-1, 3], 0.0)], 3)
    assert batch.lengths.tolist() == [4, 2]
    assert batch.tokens.tolist() == [0, 1, 2, 3, 0, 1]
    assert {name: values.tolist() for name, values in batch.fields.items()} == {
        "loss_mask": [0, 0, 1, 1, 0, 1],
        "advantages": [0, 0, 1, 1, 0, -1],
        "behaviour_logprobs": [0, 0, -1, -1.5, 0, -0.5],
        "on_policy": [0, 0, 0, 1, 0, 1],
    }
    assert {values.dtype for values in batch.fields.values()} == {np.dtype(np.float32)}


def test_what_no_model_generated_is_not_trained_on_wherever_it_stands():
    """A tool's output between two turns."""
    (batch,) = batches(GRPO, [trajectory([-1, 0, -1, -1, 0], 1.0), trajectory([-1, 0], 0.0)], 0)
    assert batch.fields["loss_mask"].tolist() == [0, 1, 0, 0, 1, 0, 1]
    assert batch.fields["advantages"].tolist() == [0, 1, 0, 0, 1, 0, -1]


def test_samples_are_numbered_over_all_groups():
    groups_and_samples = [(5, 0), (5, 1), (2, 0), (5, 0), (2, 1)]
    told = [replace(trajectory([-1, 0], 1.0, group), sample=sample) for group, sample in groups_and_samples]
    experience = join(told, 0)
    assert experience.samples.tolist() == [2, 3, 0, 2, 1]


@pytest.mark.parametrize("first", [0, -3, 10**9])
def test_samples_have_the_numbers_of_sorted_pairs(first: int):
    rng = np.random.default_rng(0)
    pairs = np.stack([rng.integers(0, 50, 400), first + rng.integers(0, 9, 400)], axis=1)
    expected = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
    assert number_samples(*pairs.T.tolist()).tolist() == expected.tolist()


def test_staleness_counts_from_the_oldest_generated_token():
    assert trajectory([-1, 4, -1, 2, 5], 1.0).oldest_version == 2


def test_parts_share_the_group_s_advantages_and_leave_out_what_has_no_reward():
    group = [trajectory([-1, *[0] * n], reward) for n, reward in enumerate([1.0, None, 0.0, 1.0, 0.0], start=1)]
    first, second = batches(GRPO, group, 0, 2)
    assert [first.lengths.tolist(), second.lengths.tolist()] == [[2, 5], [4, 6]]
    assert set(first.fields["advantages"][first.fields["loss_mask"] > 0]) == {1.0}
    assert set(second.fields["advantages"][second.fields["loss_mask"] > 0]) == {-1.0}


def test_there_are_no_batches_of_nothing():
    assert join([trajectory([-1, 0], None)], 0) is None
    assert len(batches(GRPO, [trajectory([-1, 0], 1.0)], 0, 4)) == 1


def test_targets_are_of_trajectories_or_of_tokens_and_may_leave_some_out():
    """The second trajectory is not wanted at all, nor is the first one's last token."""
    told = [trajectory([-1, 0, 0], 1.0), trajectory([-1, 0], 0.0)]
    chosen = {
        "advantages": np.array([2, 3], np.float32),
        "returns": np.array([9, 1, 2, 9, 4], np.float32),
        "loss_mask": np.array([1, 1, 0, 0, 0], np.float32),
    }
    (batch,) = batches(replace(GRPO, targets=lambda experience: chosen), told, 0, 2)
    assert batch.lengths.tolist() == [3]
    assert batch.fields["loss_mask"].tolist() == [0, 1, 0]
    assert batch.fields["advantages"].tolist() == [0, 2, 2]
    assert batch.fields["returns"].tolist() == [0, 1, 2]
    nothing = {"advantages": np.zeros(2), "loss_mask": np.zeros(2)}
    assert batches(replace(GRPO, targets=lambda experience: nothing), told, 0) == []


def test_sequences_that_count_the_same():
    """Of 1 and of 3 trained tokens: they weigh 1 and 1/3, times 4 tokens / 2 sequences."""
    told = [trajectory([-1, 0], 1.0), trajectory([-1, 0, 0, 0], 0.0)]
    (batch,) = batches(replace(GRPO, weights=sequence_mean), told, 0)
    assert batch.fields["loss_weights"].tolist() == pytest.approx([0, 2, 0, 2 / 3, 2 / 3, 2 / 3])


def test_sequences_that_are_divided_by_a_constant_length():
    """The mean over 4 tokens, weighted by 4 / (2 * 10), is the sum over a sequence divided by 10, averaged over 2."""
    mask = np.array([0, 1, 0, 1, 1, 1], np.float32)
    weights = constant_length(mask, np.array([2, 4], np.int32), length=10)
    loss = np.array([9, 5, 9, 1, 2, 3])
    assert (loss * weights * mask).sum() / mask.sum() == pytest.approx((5 / 10 + 6 / 10) / 2)


def test_sequence_sum_is_the_mean_over_sequences_of_the_sums_over_their_tokens():
    mask, loss = np.array([0, 1, 0, 1, 1, 1], np.float32), np.array([9, 5, 9, 1, 2, 3])
    algorithm = make_algorithm(RunConfig.model_validate({**RUN, "actor": {"loss_agg_mode": "sequence_sum"}}))
    assert algorithm.weights is not None
    weights = algorithm.weights(mask, np.array([2, 4], np.int32))
    assert (loss * weights * mask).sum() / mask.sum() == pytest.approx((5 + 6) / 2)


@pytest.mark.parametrize("weights", [None, sequence_mean, partial(constant_length, length=10)])
def test_what_has_no_advantage_can_be_left_out_and_the_others_count_as_before(weights):
    """The loss of a token is its advantage times its position here, averaged as the engine does it."""
    told = [trajectory([-1, *[0] * n], reward, n // 3) for n, reward in enumerate([1.0, 0.0, 1.0, 1.0, 1.0], start=1)]
    (all_of_them,) = batches(replace(GRPO, weights=weights), told, 0)
    (without,) = batches(replace(GRPO, weights=weights, skips_zero_advantages=True), told, 0)
    assert (all_of_them.lengths.tolist(), without.lengths.tolist()) == ([2, 3, 4, 5, 6], [2, 3])

    def loss(batch: Batch) -> float:
        mask, ones = batch.fields["loss_mask"], np.ones(len(batch.tokens))
        per_token = batch.fields["advantages"] * batch.tokens * batch.fields.get("loss_weights", ones)
        return float((per_token * mask).sum() / mask.sum())

    assert loss(without) == pytest.approx(loss(all_of_them))
    assert loss(without) != 0


def test_a_step_without_any_advantage_is_made_with_one_trajectory():
    told = [trajectory([-1, 0], 1.0), trajectory([-1, 0, 0], 1.0)]
    (batch,) = batches(replace(GRPO, skips_zero_advantages=True), told, 0)
    assert batch.lengths.tolist() == [2]
    assert not batch.fields["advantages"].any()


def test_supervised_batches_imitate_the_response_alone():
    batch = supervised_batch([([5, 6], [7]), ([8], [9, 10])])
    assert batch.lengths.tolist() == [3, 3]
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.fields["loss_mask"].tolist() == [0, 0, 1, 0, 1, 1]


def test_images_stay_with_their_trajectories_and_equal_ones_are_one_object():
    def picture(text):
        return bytes(bytearray(text))  # another object each time, as from other processes

    items = [
        replace(trajectory([-1, 0], 1.0), images=(picture(b"one"), picture(b"two"))),
        trajectory([-1, 0], 0.0),
        replace(trajectory([-1, 0], 0.5), images=(picture(b"one"),)),
    ]
    experience = join(items, 0)
    assert experience.batch.images == ((b"one", b"two"), (), (b"one",))
    assert experience.batch.images[0][0] is experience.batch.images[2][0]
    first, second = policy_batches(GRPO, experience, 2)
    assert (first.images, second.images) == (((b"one", b"two"), (b"one",)), ((),))
    assert join(items[1:2], 0).batch.images is None


def test_a_teachers_likeliest_tokens_are_left_to_the_loss():
    taught = {
        TEACHER_LOGPROBS: np.array([0, -0.5], np.float32),
        TEACHER_IDS: np.array([[0, 0], [3, 2**24 + 1]], np.int32),  # which float32 does not hold
        TEACHER_TOP: np.array([[0, 0], [-0.5, -1]], np.float32),
    }
    told = replace(trajectory([-1, 0], 1.0), columns=taught)
    config = RUN | {"algorithm": "distill", "teacher": {"path": "model", "top_k": 2}}
    config["actor"] = RUN["actor"] | {"skip_zero_advantages": True}
    (batch,) = batches(make_algorithm(RunConfig.model_validate(config)), [told], 0)
    assert batch.fields["advantages"].tolist() == [0, 0]
    assert batch.fields[TEACHER_IDS].tolist() == [[0, 0], [3, 2**24 + 1]]
    assert batch.fields[TEACHER_TOP].tolist() == [[0, 0], [-0.5, -1]]


def test_supervised_batches_have_the_images_of_their_prompts():
    pairs = [([5, 6], [7]), ([8], [9, 10])]
    assert supervised_batch(pairs, [(), (b"a",)]).images == ((), (b"a",))
    assert supervised_batch(pairs, [(), ()]).images is None
