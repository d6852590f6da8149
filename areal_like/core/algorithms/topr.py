"""Tapered off-policy REINFORCE: good responses are imitated, and bad ones weighted by at most their ratio."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from areal_like.core.algorithms.advantages import estimate, shape_rewards
from areal_like.core.algorithms.losses import LossInputs, TokenLoss, ratios, with_regularisers
from areal_like.core.algorithms.settings import Settings
from areal_like.core.algorithms.types import Experience
from areal_like.core.types import TURN_REWARDS, Floats


def topr(inputs: LossInputs, settings: Settings) -> TokenLoss:
    """Return REINFORCE's loss, in which the ratio, at most 1, weights tokens of responses without a positive reward.

    It reads the fields of `decoupled_ppo`, and `positive`: 1 where the response has a positive reward.

    Source: TOPR (arXiv 2503.14286), eq. 8, with the ratios of tokens in place of a trajectory's.
    """
    ratio, weight, stats = ratios(inputs, settings)
    tapered = ratio.detach().clamp(max=1).masked_fill(inputs.fields["positive"] > 0, 1)
    stats["clip_share"] = ((ratio > 1) & (inputs.fields["positive"] == 0)).to(ratio.dtype)
    return with_regularisers(inputs, settings, -weight * tapered * inputs.fields["advantages"] * inputs.logprobs, stats)


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
