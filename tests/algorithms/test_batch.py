"""Trajectories to batches, on numbers that can be checked by hand."""

from dataclasses import replace

import numpy as np
import pytest

from areal_like.algorithms.batch import policy_batches, supervised_batch
from areal_like.algorithms.presets import grpo
from areal_like.config.schema import ActorConfig
from areal_like.types import FinishReason, Trajectory

GRPO = grpo(ActorConfig())


def trajectory(versions, reward, group=0):
    """Tokens 0, 1, ... with log-probs -0.0, -0.5, -1.0, ... where they were generated."""
    n = len(versions)
    logprobs = np.where(np.array(versions) >= 0, -0.5 * np.arange(n), 0).astype(np.float32)
    tokens, made = np.arange(n, dtype=np.int32), np.array(versions, np.int32)
    return Trajectory(0, group, tokens, logprobs, made, FinishReason.STOP, reward)


def test_a_worked_example():
    """Two samples of a group, rewards 1 and 0, so advantages 1 and -1; trained at version 3."""
    (batch,) = policy_batches(GRPO, [trajectory([-1, -1, 2, 3], 1.0), trajectory([-1, 3], 0.0)], 3)
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
    (batch,) = policy_batches(GRPO, [trajectory([-1, 0, -1, -1, 0], 1.0), trajectory([-1, 0], 0.0)], 0)
    assert batch.fields["loss_mask"].tolist() == [0, 1, 0, 0, 1, 0, 1]
    assert batch.fields["advantages"].tolist() == [0, 1, 0, 0, 1, 0, -1]


def test_staleness_counts_from_the_oldest_generated_token():
    assert trajectory([-1, 4, -1, 2, 5], 1.0).oldest_version == 2


def test_parts_share_the_group_s_advantages_and_leave_out_what_has_no_reward():
    group = [trajectory([-1, *[0] * n], reward) for n, reward in enumerate([1.0, None, 0.0, 1.0, 0.0], start=1)]
    first, second = policy_batches(GRPO, group, 0, 2)
    assert [first.lengths.tolist(), second.lengths.tolist()] == [[2, 5], [4, 6]]
    assert set(first.fields["advantages"][first.fields["loss_mask"] > 0]) == {1.0}
    assert set(second.fields["advantages"][second.fields["loss_mask"] > 0]) == {-1.0}


def test_there_are_no_batches_of_nothing():
    assert policy_batches(GRPO, [trajectory([-1, 0], None)], 0) == []
    assert len(policy_batches(GRPO, [trajectory([-1, 0], 1.0)], 0, 4)) == 1


def test_groups_that_the_algorithm_does_not_keep_are_left_out():
    decided = replace(GRPO, keeps=lambda group: len({item.reward for item in group}) > 1)
    told = [trajectory([-1, 0], 1.0, 0), trajectory([-1, 0], 1.0, 1), trajectory([-1, 0, 0], 0.0, 0)]
    (batch,) = policy_batches(decided, told, 0)
    assert batch.lengths.tolist() == [2, 3]
    assert policy_batches(decided, told[:2], 0) == []


def test_weights_are_scaled_to_mean_1_over_the_trained_tokens():
    """Every sequence counts the same: tokens of 1 and of 3 generated ones weigh 1 and 1/3, times 4 / 2."""

    def per_sequence(mask, lengths):
        generated = np.add.reduceat(mask, np.cumsum(lengths) - lengths)
        return np.repeat(1 / generated, lengths)

    told = [trajectory([-1, 0], 1.0), trajectory([-1, 0, 0, 0], 0.0)]
    (batch,) = policy_batches(replace(GRPO, weights=per_sequence), told, 0)
    assert batch.fields["loss_weights"].tolist() == pytest.approx([0, 2, 0, 2 / 3, 2 / 3, 2 / 3])


def test_supervised_batches_imitate_the_response_alone():
    batch = supervised_batch([([5, 6], [7]), ([8], [9, 10])])
    assert batch.lengths.tolist() == [3, 3]
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.fields["loss_mask"].tolist() == [0, 0, 1, 0, 1, 1]
