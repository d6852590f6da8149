"""Pairs for direct preference optimization."""

import numpy as np

from areal_like.algorithms.preferences import ranked_pairs
from areal_like.algorithms.types import Experience
from areal_like.types import Batch


def test_a_group_is_paired_from_both_ends_of_its_ranking():
    """Group 0 has rewards 0, 1, 0.5, 0.75, group 1 equal ones; only generated tokens count in the distances."""
    policy, reference = np.array([9, -1, 9, -2, 9, -3, 9, -7, 9, -4, 9, -5.0]), np.array([0, -2, 0, -2.5] + [0] * 8)
    fields = {
        "loss_mask": np.array([0, 1] * 6, np.float32),
        "proximal_logprobs": policy.astype(np.float32),
        "reference_logprobs": reference.astype(np.float32),
    }
    batch = Batch(np.full(6, 2, np.int32), np.zeros(12, np.int32), fields)
    rewards, groups = np.array([0, 1, 0.5, 0.75, 1, 1], np.float32), np.array([0, 0, 0, 0, 1, 1], np.int32)
    targets = ranked_pairs(Experience(rewards, groups, batch))
    assert targets["preferred"].tolist() == [-1, 1, -1, 1, 0, 0]
    assert targets["partner"].tolist() == [0.5, 1, -7, -3, 0, 0]
    assert targets["loss_mask"].tolist() == [1, 1, 1, 1, 0, 0]


def test_equal_rewards_and_the_odd_one_have_no_partner():
    """Rewards 1, 1, 1, 0, 1 in one group: a single pair."""
    ones = np.ones(5, np.float32)
    fields = {"loss_mask": ones, "proximal_logprobs": ones, "reference_logprobs": ones}
    batch = Batch(np.ones(5, np.int32), np.zeros(5, np.int32), fields)
    targets = ranked_pairs(Experience(np.array([1, 1, 1, 0, 1], np.float32), np.zeros(5, np.int32), batch))
    assert targets["preferred"].tolist() == [1, 0, 0, -1, 0]
