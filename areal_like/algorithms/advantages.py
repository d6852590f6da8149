"""Rewards to advantages. Pure functions on numpy arrays."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from areal_like.algorithms.kl import divergence
from areal_like.algorithms.settings import Settings
from areal_like.algorithms.types import Experience
from areal_like.config.schema import NormConfig
from areal_like.types import Floats, Ints

type Reals = NDArray[np.floating]


def normalise(values: Reals, groups: Ints, norm: NormConfig, samples: Ints | None = None) -> Floats:
    """A value's distance from a mean, in standard deviations, each of the value's group or of all values.

    `values` and `groups` have the same shape; a group is named by its id, never by position, so groups may be
    incomplete and in any order. `samples` names the sample of each value where one may have several: mean and deviation
    are over samples, each of which counts once, by the mean of its values. A value whose group (or batch) has deviation
    0 tells nothing about what was better: it becomes 0, and so does one whose sample is alone in the mean it would be
    left out of. Within a group of n samples with a value each, |value| <= sqrt(n - 1), whatever is missing.

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
    return result.astype(np.float32)


def _members(groups: Ints, level: str) -> NDArray[np.int64]:
    """Number of the set of values that each value belongs to."""
    return np.unique(groups, return_inverse=True)[1] if level == "group" else np.zeros(len(groups), np.int64)


def _means(
    values: Reals, member: NDArray[np.int64], weight: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return how many samples each set has, and their mean."""
    size = np.bincount(member, weight)
    return size, np.bincount(member, values * weight) / size


def _deviation(
    values: Reals, member: NDArray[np.int64], weight: NDArray[np.float64], *, unbiased: bool
) -> tuple[NDArray[np.float64], NDArray[np.bool]]:
    """Return the deviation of each set; False where it is only rounding of the values."""
    size, mean = _means(values, member, weight)
    freedom = np.maximum(size - 1, 1) if unbiased else size
    deviation = np.sqrt(np.bincount(member, weight * (values - mean[member]) ** 2) / freedom)
    return deviation, deviation > 1e-6 * np.maximum(np.abs(mean), 1e-6)


def overlong_penalty(generated: NDArray[np.int64], longest: int, tail: int, factor: float) -> NDArray[np.float64]:
    """Return the penalty by response length: 0 up to `longest - tail`, then linear up to `factor` at `longest`.

    Source: DAPO (arXiv 2503.14476), eq. 13.
    """
    return factor * np.clip((generated - (longest - tail)) / tail, 0, 1)


def estimate(experience: Experience, settings: Settings, longest: int) -> Mapping[str, Floats]:
    """`advantages`, and `returns` for a critic where the experience has `values`; `longest` is the longest response.

    The reward of a trajectory, shaped and normalised, is that of its last generated token; each token's loses
    `kl_ctl` times its divergence from the reference. Advantages are GAE's of these, with the critic's values or 0.
    Tokens that no model generated do not count as steps: the token after a tool's output follows the call.

    Source: GAE (arXiv 1506.02438), eq. 16; KL in the reward from Ziegler et al. (arXiv 1909.08593), eq. 2.
    """
    batch = experience.batch
    generated = batch.fields["loss_mask"] > 0
    counts = np.add.reduceat(generated, np.cumsum(batch.lengths) - batch.lengths, dtype=np.int64)
    shaped = experience.rewards.astype(np.float64)
    if settings.overlong_penalty_factor:
        tail = settings.overlong_tokens or max(1, longest // 5)
        shaped -= overlong_penalty(counts, longest, tail, settings.overlong_penalty_factor)
    shaped = (shaped + settings.reward_bias) * settings.reward_scaling
    if settings.reward_clip is not None:
        shaped = shaped.clip(-settings.reward_clip, settings.reward_clip)
    rewards = normalise(shaped, experience.groups, settings.reward_norm, experience.samples)
    values = batch.fields.get("values") if settings.critic else None
    if values is None and not settings.kl_ctl and settings.discount == 1 and settings.adv_norm == NormConfig():
        return {"advantages": rewards}  # the same for all tokens of a trajectory

    own_values = np.zeros(counts.sum()) if values is None else values[generated].astype(np.float64)
    decay = settings.gae_lambda if settings.critic else 1.0  # without values λ would be a second discount
    advantages = gae(
        _token_rewards(experience, rewards, counts, settings), own_values, counts, settings.discount, decay
    )
    groups = np.repeat(experience.groups, counts)
    fields = {"advantages": normalise(advantages, groups, settings.adv_norm)}
    if values is not None:
        fields["returns"] = (advantages + own_values).astype(np.float32)
    return {name: _fill_places(generated, own) for name, own in fields.items()}


def _token_rewards(
    experience: Experience, rewards: Floats, counts: NDArray[np.int64], settings: Settings
) -> NDArray[np.float64]:
    """`[generated tokens]`."""
    result = np.zeros(counts.sum())
    if settings.kl_ctl:
        fields = experience.batch.fields
        generated = fields["loss_mask"] > 0
        log_ratio = (fields["behaviour_logprobs"] - fields["reference_logprobs"])[generated].astype(np.float64)
        result -= settings.kl_ctl * divergence(log_ratio, settings.kl_estimator or "k1")
    result[np.cumsum(counts) - 1] += rewards
    return result


def gae(
    rewards: NDArray[np.float64],
    values: NDArray[np.float64],
    lengths: NDArray[np.int64],
    discount: float,
    decay: float,
) -> NDArray[np.float64]:
    """Generalised advantages of episodes that lie back to back, `[steps]`; `lengths` is `[episodes]`, none of it 0.

    A[t] = sum over l of (discount decay)^l delta[t + l], with delta[t] = r[t] + discount V[t + 1] - V[t], and V = 0
    after an episode's end.

    Source: GAE (arXiv 1506.02438), eq. 16.
    """
    last = np.cumsum(lengths) - 1
    following = np.append(values[1:], 0.0)
    following[last] = 0
    result = rewards + discount * following - values
    longest_first = np.argsort(-lengths, kind="stable")
    last, lengths = last[longest_first], lengths[longest_first]
    for back in range(1, int(lengths[0])):  # one step of all episodes that are as long
        step = last[: np.searchsorted(-lengths, -back)] - back
        result[step] += discount * decay * result[step + 1]
    return result


def _fill_places(places: NDArray[np.bool], values: Floats) -> Floats:
    """The values at their places, `[tokens]`, 0 elsewhere."""
    result = np.zeros(len(places), np.float32)
    result[places] = values
    return result
