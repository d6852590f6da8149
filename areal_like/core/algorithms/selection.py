"""The selection of trained trajectories, after the normalisation of rewards over all of them."""

import numpy as np
from numpy.typing import NDArray

from areal_like.core.algorithms.settings import Settings
from areal_like.core.algorithms.types import Experience


def select(experience: Experience, settings: Settings) -> NDArray[np.bool] | None:
    """Return a mask of the trained trajectories, None for all.

    The bounds of a group apply to the mean of its original rewards, each sample counts once.
    """
    low, high = settings.group_reward_above, settings.group_reward_below
    if not settings.mask_truncated and low is None and high is None:
        return None
    result = np.ones(len(experience.rewards), bool)
    if settings.mask_truncated:
        result &= ~experience.truncated
    if low is not None or high is not None:
        mean = _group_means(experience)
        result &= (mean > (-np.inf if low is None else low)) & (mean < (np.inf if high is None else high))
    return result


def _group_means(experience: Experience) -> NDArray[np.float64]:
    """Return the mean reward of each trajectory's group, `[trajectories]`."""
    sample = np.unique(experience.samples, return_inverse=True)[1]
    weight = 1 / np.bincount(sample)[sample]
    group = np.unique(experience.groups, return_inverse=True)[1]
    return (np.bincount(group, weight * experience.rewards) / np.bincount(group, weight))[group]
