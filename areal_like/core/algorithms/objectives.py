"""Surrogates of the policy's gain other than PPO's and CISPO's; fields and statistics as in `decoupled_ppo`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from areal_like.core.algorithms.losses import LossInputs, TokenLoss, cispo, decoupled_ppo, ratios, with_regularisers
from areal_like.core.algorithms.settings import Objective, Settings
from areal_like.core.algorithms.topr import topr


def cpgd(inputs: LossInputs, settings: Settings) -> TokenLoss:
    """Return REINFORCE's objective with log-probs clipped where PPO clips the ratio, without importance weights.

    Source: CPGD (arXiv 2505.12504), eq. 3; the policy drift is `policy_drift_coeff`.
    """
    advantages = inputs.fields["advantages"]
    ratio, weight, stats = ratios(inputs, settings)
    log_ratio, logprobs = ratio.log(), inputs.logprobs
    least = -math.inf if settings.eps_clip >= 1 else math.log(1 - settings.eps_clip)
    excess = log_ratio - log_ratio.clamp(least, math.log(1 + settings.eps_clip_higher))
    outside = (excess * advantages) > 0  # beyond the clip, in the direction of the gain
    clipped = logprobs - excess.where(outside, excess.new_zeros(()))
    stats["clip_share"] = outside.to(ratio.dtype)
    return with_regularisers(inputs, settings, -weight * clipped * advantages, stats)


def gmpo(inputs: LossInputs, settings: Settings) -> TokenLoss:
    """Return the geometric mean of a sequence's ratios, each clipped in log space, times the sequence's advantage.

    `eps_clip` and `eps_clip_higher` bound the logarithm of a token's ratio.

    Source: GMPO (arXiv 2507.20673), eq. 4.
    """
    advantages = inputs.fields["advantages"]
    ratio, weight, stats = ratios(inputs, settings)
    sign, log_ratio = advantages.sign(), ratio.log()
    clipped = log_ratio.clamp(-settings.eps_clip, settings.eps_clip_higher)
    least = sign * (sign * log_ratio).minimum(sign * clipped)
    gain = inputs.sequences.mean(least).exp() * inputs.sequences.mean(advantages)
    stats["clip_share"] = (least != log_ratio).to(ratio.dtype)
    return with_regularisers(inputs, settings, -weight * gain, stats)


def sapo(inputs: LossInputs, settings: Settings) -> TokenLoss:
    """Return the ratio under a sigmoid gate in place of a clip; the gate of negative advantages is steeper.

    Source: SAPO (arXiv 2511.20347), eq. 5 and 6.
    """
    advantages = inputs.fields["advantages"]
    ratio, weight, stats = ratios(inputs, settings)
    positive, negative = (ratio.new_tensor(tau) for tau in (settings.sapo_tau_pos, settings.sapo_tau_neg))
    tau = positive.where(advantages > 0, negative)
    gate = (tau * (ratio - 1)).sigmoid() * 4 / tau
    return with_regularisers(inputs, settings, -weight * gate * advantages, stats)


OBJECTIVES: Mapping[Objective, Callable[[LossInputs, Settings], TokenLoss]] = {
    "ppo": decoupled_ppo,
    "cispo": cispo,
    "cpgd": cpgd,
    "gmpo": gmpo,
    "sapo": sapo,
    "topr": topr,
}
