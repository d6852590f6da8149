"""The built-in algorithms by name, and users' own; the targets of DPO and of supervised fine-tuning."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import numpy as np

from areal_like.core.algorithms.advantages import estimate, estimate_with_signs
from areal_like.core.algorithms.batch import constant_length, sequence_mean, turn_mean
from areal_like.core.algorithms.losses import OBJECTIVES, ValueLoss, dpo, sft, value_loss
from areal_like.core.algorithms.settings import PRESETS, Settings, settings_of
from areal_like.core.algorithms.types import Algorithm, Experience, Need
from areal_like.core.config.schema import RunConfig
from areal_like.core.types import TURN_REWARDS, Floats, Ints, LossSpec, Trajectory
from areal_like.core.user_code import UserCodeError, load_object, where_it_failed


def every_pair(experience: Experience, beta: float) -> Mapping[str, Floats]:
    """Return DPO's loss, at the weights at the start of the step, of all pairs in a group with different rewards.

    Returns fields `[trajectories]` whose mean over trajectories with a partner is the mean over all pairs: `pair_loss`,
    of its pairs; `slope`, the loss's derivative by the trajectory's own log policy - log reference; `margin` and
    `preferred_share`, over its pairs; `loss_mask`, 0 without a partner. Reads `proximal_logprobs` and
    `reference_logprobs`. With all pairs, a response that is alone among seven others counts seven times: at margins
    near 0 the gradient equals the one of rewards less their group's mean.

    Source: DPO (arXiv 2305.18290), eq. 7; pairs ranked by a judge while training from Online AI feedback
    (arXiv 2402.04792), which draws two responses to a prompt.
    """
    batch, rewards = experience.batch, experience.rewards
    log_ratio = (batch.fields["proximal_logprobs"] - batch.fields["reference_logprobs"]) * batch.fields["loss_mask"]
    distance = np.add.reduceat(log_ratio, np.cumsum(batch.lengths) - batch.lengths, dtype=np.float64)
    loss, slope, margins, right, partners = np.zeros((5, len(rewards)))
    for group in np.unique(experience.groups):
        of = np.flatnonzero(experience.groups == group)
        better = rewards[of][:, None] > rewards[of]  # [better one, worse one]
        margin = beta * (distance[of][:, None] - distance[of])
        surprise = np.where(better, np.logaddexp(0, -margin), 0)  # -log sigmoid
        pull = np.where(better, beta * np.exp(-np.logaddexp(0, margin)), 0)  # beta * sigmoid(-margin)
        slope[of] = pull.sum(0) - pull.sum(1)
        for total, values in ((loss, surprise), (margins, better * margin), (right, better & (margin > 0))):
            total[of] = values.sum(0) + values.sum(1)
        partners[of] = better.sum(0) + better.sum(1)
    paired, n_pairs = partners > 0, max(partners.sum() / 2, 1)
    each = np.maximum(partners, 1)
    return {
        "pair_loss": (loss / 2 * paired.sum() / n_pairs).astype(np.float32),
        "slope": (slope * paired.sum() / n_pairs).astype(np.float32),
        "margin": (margins / each).astype(np.float32),
        "preferred_share": (right / each).astype(np.float32),
        "loss_mask": paired.astype(np.float32),
    }


def make_algorithm(config: RunConfig) -> Algorithm:
    """Return the Algorithm named by the key `algorithm`, or built from the configuration by a user's function.

    Raises UserCodeError.
    """
    name = config.algorithm
    make = ALGORITHMS[name] if name in ALGORITHMS else load_object(name)
    try:
        made = make if isinstance(make, Algorithm) else make(config)
    except Exception as error:  # a user's function may raise anything
        raise UserCodeError(f"{name} failed: {where_it_failed(error, name.rpartition(':')[0])}") from error
    if not isinstance(made, Algorithm):
        raise UserCodeError(f"{name} returned {made!r:.80}, not an areal_like.core.algorithms.types.Algorithm")
    return made


def policy_gradient(preset: Settings, config: RunConfig) -> Algorithm:
    """Return an algorithm of `PRESETS`, changed by the actor's keys."""
    settings, longest = settings_of(preset, config.actor), config.gconfig.max_new_tokens
    trains_on_top = bool(settings.teacher_coef and config.teacher and config.teacher.top_k)
    targets = estimate_with_signs if settings.objective == "topr" else estimate
    return Algorithm(
        targets=partial(targets, settings=settings, longest=longest),
        loss=LossSpec(OBJECTIVES[settings.objective], settings),
        needs=_needs(settings),
        critic=LossSpec(value_loss, ValueLoss(config.critic.eps_clip)) if settings.critic and config.critic else None,
        keeps=tells_apart if settings.dynamic_sampling else None,
        weights=_weights(settings, longest),
        skips_zero_advantages=settings.skip_zero_advantages and settings.only_advantages and not trains_on_top,
    )


def _needs(settings: Settings) -> frozenset[Need]:
    wanted: Mapping[Need, bool] = {
        "proximal": settings.use_decoupled_loss,
        "reference": bool(settings.kl_ctl or settings.kl_loss_coef),
        "values": settings.critic,
        "teacher": bool(settings.teacher_coef),
        "baselines": settings.prompt_baseline,
    }
    return frozenset(need for need, holds in wanted.items() if holds)


def _weights(settings: Settings, longest: int) -> Callable[[Floats, Ints], Floats] | None:
    modes = {
        "token_mean": None,
        "sequence_mean": sequence_mean,
        "turn_mean": turn_mean,
        "sequence_sum": partial(constant_length, length=1),
        "constant": partial(constant_length, length=longest),
    }
    return modes[settings.loss_agg_mode]


def tells_apart(group: Sequence[Trajectory]) -> bool:
    """Return whether a group's rewards, or turns' rewards, differ; keep a group without rewards: its verifier failed.

    Source: DAPO (arXiv 2503.14476), eq. 11.
    """
    return len({(item.reward, *_by_turn(item)) for item in group if item.reward is not None}) != 1


def _by_turn(item: Trajectory) -> list[float]:
    """Return the rewards of a trajectory's turns, without zeros after the last reward."""
    starts = np.flatnonzero(np.diff(item.generated, prepend=False) & item.generated)
    given = item.columns.get(TURN_REWARDS)
    if given is None or not len(starts):
        return []
    rewards: Floats = np.trim_zeros(np.add.reduceat(given, starts), "b")
    return rewards.tolist()


def online_dpo(config: RunConfig) -> Algorithm:
    """Return the DPO algorithm on all pairs of each group, ranked by reward."""
    return Algorithm(
        targets=partial(every_pair, beta=config.actor.dpo_beta),
        loss=LossSpec(dpo),
        needs=frozenset({"policy", "reference"}),
        weights=sequence_mean,
    )


def imitation(config: RunConfig) -> Algorithm:
    """Return the algorithm of supervised fine-tuning at temperature 1 on responses with a positive reward.

    Source: RAFT (arXiv 2304.06767), alg. 1, where the model has generated them.
    """
    return Algorithm(targets=keep_rewarded, loss=LossSpec(sft), temperature=1.0)


def keep_rewarded(experience: Experience) -> Mapping[str, Floats]:
    """Return `loss_mask` `[trajectories]`: 1 where the reward is positive."""
    return {"loss_mask": (experience.rewards > 0).astype(np.float32)}


ALGORITHMS: Mapping[str, Callable[[RunConfig], Algorithm]] = MappingProxyType(
    {name: partial(policy_gradient, settings) for name, settings in PRESETS.items()}
    | {"dpo": online_dpo, "sft": imitation}
)
