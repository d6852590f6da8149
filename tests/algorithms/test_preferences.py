"""Pairs for direct preference optimization."""

import numpy as np

from areal_like.algorithms.preferences import best_and_worst
from areal_like.algorithms.types import Experience
from areal_like.types import Batch


def test_each_group_gives_its_best_and_its_worst_response():
    """Group 0 has rewards 0, 1, 0.5, group 1 equal ones; only generated tokens count in the distances."""
    policy, reference = np.array([9, -1, 9, -2, 9, -3, 9, -4, 9, -5.0]), np.array([0, -2, 0, -2.5, 0, 0, 0, 0, 0, 0.0])
    fields = {
        "loss_mask": np.array([0, 1] * 5, np.float32),
        "proximal_logprobs": policy.astype(np.float32),
        "reference_logprobs": reference.astype(np.float32),
    }
    batch = Batch(np.full(5, 2, np.int32), np.zeros(10, np.int32), fields)
    rewards, groups = np.array([0, 1, 0.5, 1, 1], np.float32), np.array([0, 0, 0, 1, 1], np.int32)
    targets = best_and_worst(Experience(rewards, groups, batch))
    assert targets["preferred"].tolist() == [-1, 1, 0, 0, 0]
    assert targets["partner"].tolist() == [0.5, 1, 0, 0, 0]
    assert targets["loss_mask"].tolist() == [1, 1, 0, 0, 0]
