"""Means and deviations of values over groups, with each sample counted once."""

import numpy as np
from numpy.typing import NDArray

from areal_like.core.config.schema import NormConfig
from areal_like.core.types import Floats, Ints

type Reals = NDArray[np.floating]


def normalise(values: Reals, groups: Ints, norm: NormConfig, samples: Ints | None = None) -> Floats:
    """Return values minus a mean, divided by a standard deviation, each of the value's group or of all values.

    `values` and `groups` have the same shape; a group is named by its id, never by position, so groups may be
    incomplete and in any order. `samples` has the sample of each value if a sample may have several values: mean and
    deviation are over samples, and each sample counts once, with the mean of its values. A value whose group (or batch)
    has deviation 0 contains no preference and becomes 0, and so does the only sample of a leave-one-out mean. In a
    group of n samples with one value each, |value| <= sqrt(n - 1), even if values are missing.

    Source: DeepSeekMath (arXiv 2402.03300), eq. 3, for group and group; Dr. GRPO (arXiv 2503.20783) without deviation;
    RLOO (arXiv 2402.14740), eq. 8, for `mean_leave1out`; Lite PPO (arXiv 2508.08221) for group and batch.
    """
    result = values.astype(np.float64)
    sample = np.arange(len(values)) if samples is None else np.unique(samples, return_inverse=True)[1]
    weight = 1 / np.bincount(sample)[sample]
    if norm.mean_level is not None:
        member = _members(groups, norm.mean_level)
        size, mean = _means(values, member, weight)
        if norm.mean_leave1out:
            own, others = np.bincount(sample, values * weight)[sample], np.maximum(np.rint(size) - 1, 1)
            alone = np.rint(size) == 1
            result -= np.where(alone[member], values, ((size * mean)[member] - own) / others[member])
        else:
            result -= mean[member]
    if norm.std_level is not None:
        member = _members(groups, norm.std_level)
        deviation, informative = _deviation(values, member, weight, unbiased=norm.std_unbiased)
        result = np.where(informative[member], result / np.where(informative, deviation, 1)[member], 0)
    if norm.clip is not None:
        result = result.clip(-norm.clip, norm.clip)
    return result.astype(np.float32)


def _members(groups: Ints, level: str) -> NDArray[np.int64]:
    """Return the number of each value's set."""
    return np.unique(groups, return_inverse=True)[1] if level == "group" else np.zeros(len(groups), np.int64)


def _means(
    values: Reals, member: NDArray[np.int64], weight: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the number and the mean of each set's samples."""
    size = np.bincount(member, weight)
    return size, np.bincount(member, values * weight) / size


def _deviation(
    values: Reals, member: NDArray[np.int64], weight: NDArray[np.float64], *, unbiased: bool
) -> tuple[NDArray[np.float64], NDArray[np.bool]]:
    """Return the deviation of each set; False if it is only a rounding error of the values."""
    size, mean = _means(values, member, weight)
    freedom = np.maximum(size - 1, 1) if unbiased else size
    deviation = np.sqrt(np.bincount(member, weight * (values - mean[member]) ** 2) / freedom)
    return deviation, deviation > 1e-6 * np.maximum(np.abs(mean), 1e-6)
