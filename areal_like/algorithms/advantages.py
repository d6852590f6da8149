"""Rewards to advantages. Pure functions on numpy arrays."""

import numpy as np

from areal_like.types import Floats, Ints


def group_normalised(rewards: Floats, groups: Ints) -> Floats:
    """GRPO's advantage: a reward's distance from its group's mean, in the group's standard deviations.

    `rewards` and `groups` are `[trajectories]`; a group is named by its id, never by position, so groups may be
    incomplete and in any order. A group with fewer than two rewards, or with equal ones, tells nothing about what
    was better: its advantages are 0. Otherwise |advantage| <= sqrt(n - 1) for a group of n, whatever is missing.

    Source: DeepSeekMath (arXiv 2402.03300), eq. 3.
    """
    _, member = np.unique(groups, return_inverse=True)
    size = np.bincount(member)
    mean = np.bincount(member, rewards) / size
    distance = rewards - mean[member]
    deviation = np.sqrt(np.bincount(member, distance**2) / size)
    # Below this share of the rewards' own size a deviation is rounding, not a preference.
    smallest = 1e-6 * np.maximum(np.abs(mean), 1e-6)
    informative = (deviation > smallest)[member]
    advantages = np.zeros_like(distance)
    advantages[informative] = (distance / np.where(deviation > 0, deviation, 1.0)[member])[informative]
    return advantages.astype(np.float32)
