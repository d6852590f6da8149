"""From rewards to advantages: pure functions on numpy arrays."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from areal_like.core.algorithms.losses import divergence
from areal_like.core.algorithms.normalise import normalise
from areal_like.core.algorithms.settings import Settings
from areal_like.core.algorithms.turns import credit_each_turn, find_trees, share_costs, spread, values_of
from areal_like.core.algorithms.types import Experience
from areal_like.core.config.schema import NormConfig
from areal_like.core.types import LEAST_LOGPROB, TEACHER_LOGPROBS, TEACHER_TOP, TURN_REWARDS, Floats


def overlong_penalty(generated: NDArray[np.int64], longest: int, tail: int, factor: float) -> NDArray[np.float64]:
    """Return the penalty by response length: 0 up to `longest - tail`, then linear up to `factor` at `longest`.

    Source: DAPO (arXiv 2503.14476), eq. 13.
    """
    return factor * np.clip((generated - (longest - tail)) / tail, 0, 1)


def estimate(experience: Experience, settings: Settings, longest: int) -> Mapping[str, Floats]:
    """Return `advantages`, `loss_mask` if only some tokens are trained, and a critic's `returns` if there are `values`.

    `longest` is the length of the longest response. The last generated token has the trajectory's reward, shaped and
    normalised; each token's reward is reduced by `kl_ctl` times its divergence from the reference. Advantages are GAE
    of these rewards, with the critic's values or 0, times `reward_coef`. A teacher adds `teacher_coef` times the
    log-ratio of its probability to the policy's at each token, whose negative mean is the reverse KL divergence; the
    loss handles its likeliest ids. Rewards of turns are credited to their turn and earlier ones. Only generated tokens
    are steps: the token after a tool's output follows the call. In trees of groups with shared tokens, a node has the
    mean of its children's advantages. With `turns_alone` each turn is a sample of its own (`turns.py`).

    Source: GAE (arXiv 1506.02438), eq. 16; KL in the reward from Ziegler et al. (arXiv 1909.08593), eq. 2; the teacher
    from Thinking Machines Lab, On-Policy Distillation (2025), whose discount is 0.
    """
    batch = experience.batch
    generated = batch.fields["loss_mask"] > 0
    counts = np.add.reduceat(generated, np.cumsum(batch.lengths) - batch.lengths, dtype=np.int64)
    shaped = shape_rewards(experience, settings, longest)
    chosen = select(experience, settings)
    selection = {} if chosen is None else {"loss_mask": chosen.astype(np.float32)}
    values = batch.fields.get("values") if settings.critic else None
    by_turn = settings.turns_alone or settings.turn_discount != 1 or TURN_REWARDS in batch.fields
    sampled_by_teacher = settings.teacher_coef and TEACHER_TOP not in batch.fields  # else the loss uses the teacher
    per_token = settings.kl_ctl or sampled_by_teacher or settings.discount != 1 or by_turn or experience.nodes
    if values is None and not per_token and settings.adv_norm == NormConfig():
        rewards = normalise(shaped, experience.groups, settings.reward_norm, experience.samples)
        return {"advantages": _clip(np.float32(settings.reward_coef) * rewards, settings), **selection}

    own_values = np.zeros(counts.sum()) if values is None else values[generated].astype(np.float64)
    decay = settings.gae_lambda if settings.critic else 1.0  # without values λ would be a second discount
    credited = _credit(experience, shaped, counts, settings, by_turn=by_turn)
    token_rewards = credited - _divergence_cost(experience, settings)
    advantages = gae(token_rewards, own_values, counts, settings.discount, decay)
    groups = np.repeat(experience.groups, counts)
    total = settings.reward_coef * advantages
    if sampled_by_teacher:
        taught = np.maximum(batch.fields[TEACHER_LOGPROBS], LEAST_LOGPROB)
        log_ratio = (taught - batch.fields["behaviour_logprobs"])[generated]
        total += settings.teacher_coef * log_ratio
    kept = slice(None) if chosen is None else np.repeat(chosen, counts)  # other tokens' advantages do not count
    normal = np.zeros(len(total), np.float32)
    normal[kept] = normalise(total[kept], groups[kept], settings.adv_norm)
    fields = {"advantages": _clip(normal, settings)}
    if values is not None:
        fields["returns"] = (advantages + own_values).astype(np.float32)
    return {name: _fill_places(generated, own) for name, own in fields.items()} | selection


def estimate_with_signs(experience: Experience, settings: Settings, longest: int) -> Mapping[str, Floats]:
    """Return the fields of `estimate`, and `positive` `[trajectories]`: 1 for a reward above 0, with the rewards of
    turns.

    `estimate` shapes the reward: with bias, baseline, length penalty and clip.
    """
    batch, rewards = experience.batch, shape_rewards(experience, settings, longest)
    if (turns := batch.fields.get(TURN_REWARDS)) is not None:
        rewards += settings.reward_scaling * np.add.reduceat(
            turns, np.cumsum(batch.lengths) - batch.lengths, dtype=np.float64
        )
    return {**estimate(experience, settings, longest), "positive": (rewards > 0).astype(np.float32)}


def _credit(
    experience: Experience, shaped: NDArray[np.float64], counts: NDArray[np.int64], settings: Settings, *, by_turn: bool
) -> NDArray[np.float64]:
    """Return the reward of each generated token: of its turn, its node, or the trajectory's at the last token."""
    if settings.turns_alone:
        return credit_each_turn(experience, shaped, settings)
    if experience.nodes:
        return _credit_nodes(experience, shaped, settings, by_turn=by_turn)
    if by_turn:
        return _credit_turns(experience, shaped, counts, settings)
    credited = np.zeros(counts.sum())
    credited[np.cumsum(counts) - 1] = normalise(shaped, experience.groups, settings.reward_norm, experience.samples)
    return credited


def shape_rewards(experience: Experience, settings: Settings, longest: int) -> NDArray[np.float64]:
    """Return each trajectory's reward minus baseline and length penalty, biased, scaled and clipped."""
    shaped = experience.rewards.astype(np.float64)
    if settings.prompt_baseline:
        if experience.baselines is None:
            raise ValueError("the experience has no baselines")
        shaped -= experience.baselines
    if settings.overlong_penalty_factor:
        tail = settings.overlong_tokens or max(1, longest // 5)
        shaped -= overlong_penalty(_response_lengths(experience), longest, tail, settings.overlong_penalty_factor)
    shaped = (shaped + settings.reward_bias) * settings.reward_scaling
    if settings.reward_clip is not None:
        shaped = shaped.clip(-settings.reward_clip, settings.reward_clip)
    return shaped


def _clip(advantages: Floats, settings: Settings) -> Floats:
    most = settings.advantage_clip
    return advantages if most is None else advantages.clip(-most, most)


def _divergence_cost(experience: Experience, settings: Settings) -> NDArray[np.float64] | float:
    """Return the cost of each generated token's divergence from the reference, `[generated tokens]`.

    The divergences after a node of a tree count as the mean over its continuations.
    """
    if not settings.kl_ctl:
        return 0.0
    fields = experience.batch.fields
    generated = fields["loss_mask"] > 0
    log_ratio = (fields["behaviour_logprobs"] - fields["reference_logprobs"])[generated].astype(np.float64)
    costs = np.asarray(settings.kl_ctl * divergence(log_ratio, settings.kl_estimator or "k1"))
    return share_costs(find_trees(experience), costs, np.flatnonzero(generated)) if experience.nodes else costs


def _response_lengths(experience: Experience) -> NDArray[np.int64]:
    """Return each response's number of generated tokens, including shared ones."""
    batch = experience.batch
    starts = np.cumsum(batch.lengths) - batch.lengths
    counts = np.add.reduceat(batch.fields["loss_mask"] > 0, starts, dtype=np.int64)
    if not experience.nodes:
        return counts
    return np.array(
        [sum(node.tokens for node in nodes) or own for nodes, own in zip(experience.nodes, counts, strict=True)]
    )


def _credit_nodes(
    experience: Experience, shaped: NDArray[np.float64], settings: Settings, *, by_turn: bool
) -> NDArray[np.float64]:
    """Return rewards of generated tokens whose suffix sums are the normalised values of their nodes.

    Rewards of trajectories are normalised before they become values, unless rewards of turns or a discount between
    turns make values of their own, which are normalised like turns.
    """
    trees, fields = find_trees(experience), experience.batch.fields
    own = np.zeros(len(trees.parents))
    nodes, trajectories, places = np.array(trees.trained, np.int64).T
    if by_turn:
        if (given := fields.get(TURN_REWARDS)) is not None:
            own[nodes] = settings.reward_scaling * given[places]
        values = values_of(trees, shaped, own, settings.turn_discount)
        groups, samples = experience.groups[trajectories], experience.samples[trajectories]
        worth = np.zeros(len(own))
        worth[nodes] = normalise(values[nodes], groups, settings.reward_norm, samples)
    else:
        rewards = normalise(shaped, experience.groups, settings.reward_norm, experience.samples)
        worth = values_of(trees, rewards.astype(np.float64), own, 1.0)
    if settings.branch_baseline == "parent":
        forks = np.array(trees.forks)
        worth = np.where(forks >= 0, worth - worth[forks], worth)
    return spread(trees, worth, np.flatnonzero(fields["loss_mask"] > 0))


def _credit_turns(
    experience: Experience, shaped: NDArray[np.float64], counts: NDArray[np.int64], settings: Settings
) -> NDArray[np.float64]:
    """Return rewards of generated tokens whose suffix sums are the normalised returns of their turns.

    A turn is a run of generated tokens. Its return is its own reward plus the rewards of later turns of its trajectory,
    discounted by turn, with the trajectory's reward `shaped` at the last turn. A sample counts once in the mean of its
    group, with the mean of its turns' returns.
    """
    fields = experience.batch.fields
    generated = fields["loss_mask"] > 0
    places = np.flatnonzero(generated)
    trajectory = np.repeat(np.arange(len(counts)), counts)
    last = np.flatnonzero((np.diff(places, append=-1) != 1) | (np.diff(trajectory, append=-1) != 0))  # of each turn
    owner = trajectory[last]
    turns = np.bincount(owner, minlength=len(counts))  # of each trajectory
    own = np.zeros(len(last))
    if (given := fields.get(TURN_REWARDS)) is not None:
        own += settings.reward_scaling * given[places[last]]
    own[np.cumsum(turns) - 1] += shaped
    returns = gae(own, np.zeros(len(own)), turns, settings.turn_discount, 1.0)
    worth = normalise(returns, experience.groups[owner], settings.reward_norm, experience.samples[owner])
    following = np.append(worth[1:], 0)
    following[np.cumsum(turns) - 1] = 0
    result = np.zeros(len(places))
    result[last] = worth - following
    return result


def gae(
    rewards: NDArray[np.float64], values: NDArray[np.float64], lengths: NDArray[np.int64], discount: float, decay: float
) -> NDArray[np.float64]:
    """Return generalised advantages of concatenated episodes, `[steps]`; `lengths` `[episodes]` are positive.

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
    for back in range(1, int(lengths[0])):  # one step of all episodes of at least this length
        step = last[: np.searchsorted(-lengths, -back)] - back
        result[step] += discount * decay * result[step + 1]
    return result


def _fill_places(places: NDArray[np.bool], values: Floats) -> Floats:
    """Return an array `[tokens]` with the values at their places and 0 elsewhere."""
    result = np.zeros(len(places), np.float32)
    result[places] = values
    return result


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
