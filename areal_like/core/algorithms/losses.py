"""Losses as pure functions on flat tensors; every tensor is `[tokens]`, one value per predicted token.

A loss takes LossInputs and its own parameters; policy gradients take the run's `Settings`. It returns the loss and
named statistics of every token; the engine averages both over the tokens of all ranks whose `loss_mask` is 1. The
controller imports these functions to name them, so torch is imported only for its types.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal_like.core.algorithms.settings import Objective, Settings
from areal_like.core.config.schema import KLEstimator
from areal_like.core.types import LEAST_LOGPROB, TEACHER_TOP

if TYPE_CHECKING:
    from torch import Tensor

    from areal_like.core.types import LossSpec

MOST_EXPONENT = 20.0  # e^20 is 5e8: far beyond any use of a ratio, and finite in every data type but float16


def divergence(log_ratio: Any, estimator: KLEstimator) -> Any:
    """Return KL(policy, reference) from samples of the policy, per token; `log_ratio` is log policy - log reference.

    k1 is unbiased and may be negative, k2 is half of its square, biased and never negative, k3 is unbiased and never
    negative. Exponents are limited to MOST_EXPONENT.

    Source: Schulman, Approximating KL divergence (joschu.net/blog/kl-approx.html).
    """
    if estimator == "k1":
        return log_ratio
    return (
        log_ratio**2 / 2
        if estimator == "k2"
        else math.e ** (-log_ratio).clip(-MOST_EXPONENT, MOST_EXPONENT) - 1 + log_ratio
    )


type TokenLoss = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class Sequences:
    """Index of each token's sequence, of `count` in the batch: `numbers` `[tokens]`.

    A sequence's tokens may be on several context-parallel ranks: `over_ranks` sums a tensor over these ranks, with
    gradient. All of them must request the same sums and means.
    """

    numbers: Tensor
    count: int
    over_ranks: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def sum(self, values: Tensor) -> Tensor:
        """Return for each token the sum over the trained tokens of its sequence, `[tokens]`, differentiable."""
        return self.over_ranks(values.new_zeros(self.count).index_add(0, self.numbers, values))[self.numbers]

    def mean(self, values: Tensor) -> Tensor:
        """Return for each token the mean over the trained tokens of its sequence, `[tokens]`, differentiable."""
        return self.sum(values) / self.sum(values.new_ones(len(values)))


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss.

    `logprobs` are the current policy's, with gradient, and `entropy` its entropy; `fields` are the batch's; `sequences`
    maps tokens to sequences. `choices` `[tokens, k]` has the current policy's log-probs, with gradient, of the
    teacher's likeliest ids, if the batch has them. A critic's loss gets `values`, with gradient, instead: its
    `logprobs` and `entropy` are empty.
    """

    logprobs: Tensor
    entropy: Tensor
    fields: Mapping[str, Tensor]
    sequences: Sequences
    values: Tensor | None = None
    choices: Tensor | None = None


def of_tokens(loss: LossSpec, inputs: LossInputs) -> TokenLoss:
    """Apply a loss to a micro-batch; raise ValueError, which names it, unless each result has one value per token."""
    per_token, statistics = loss.function(inputs, loss.parameters)
    shape = (inputs.logprobs if inputs.values is None else inputs.values).shape
    for name, value in {
        "a loss": per_token,
        **{f"the statistic {name}": it for name, it in statistics.items()},
    }.items():
        if value.shape != shape:
            of, has, wanted = getattr(loss.function, "__name__", loss.function), list(value.shape), list(shape)
            raise ValueError(
                f"{of} returned {name} of shape {has}, not {wanted}: one number for every token, not a mean"
            )
    return per_token, statistics


def sft(inputs: LossInputs, parameters: None) -> TokenLoss:
    """Return the negative log-likelihood of the given tokens."""
    return -inputs.logprobs, {"entropy": inputs.entropy}


def decoupled_ppo(inputs: LossInputs, settings: Settings) -> TokenLoss:
    """Return PPO's loss, clipped against the proximal policy and weighted by its ratio to the behaviour policy.

    Fields: `advantages`, `behaviour_logprobs` (the servers', temperature applied), `on_policy` (1 if the token was
    generated with the weights at the start of the step), and `proximal_logprobs` (of the weights at the start of the
    step). Without `proximal_logprobs`, the current policy is the proximal one, which is exact for the first optimizer
    step of a batch. A KL term also needs `reference_logprobs`.

    Source: AReaL (arXiv 2505.24298), eq. 5; PPO (arXiv 1707.06347), eq. 7, where not decoupled; clip-higher from DAPO
    (arXiv 2503.14476); a sequence's ratio from GSPO (arXiv 2507.18071), eq. 7; dual clip from Ye et al.
    (arXiv 1912.09729), eq. 5; `kl` among the statistics is Schulman's k3 estimator.
    """
    advantages = inputs.fields["advantages"]
    ratio, weight, stats = ratios(inputs, settings)
    clipped = ratio.clamp(1 - settings.eps_clip, 1 + settings.eps_clip_higher)
    surrogate, clipped_surrogate = ratio * advantages, clipped * advantages
    objective = surrogate.minimum(clipped_surrogate)
    if settings.c_clip is not None:
        objective = objective.maximum(objective.where(advantages >= 0, settings.c_clip * advantages))
    stats["clip_share"] = (clipped_surrogate < surrogate).to(ratio.dtype)
    return with_regularisers(inputs, settings, -weight * objective, stats)


def cispo(inputs: LossInputs, settings: Settings) -> TokenLoss:
    """Return the loss of REINFORCE weighted by the ratio, which is clipped: every token keeps its gradient.

    It reads the fields of `decoupled_ppo`.

    Source: MiniMax-M1 (arXiv 2506.13585), eq. 4 and 5.
    """
    ratio, weight, stats = ratios(inputs, settings)
    clipped = ratio.detach().clamp(1 - settings.eps_clip, 1 + settings.eps_clip_higher)
    stats["clip_share"] = (clipped != ratio).to(ratio.dtype)
    loss = -weight * clipped * inputs.fields["advantages"] * inputs.logprobs
    return with_regularisers(inputs, settings, loss, stats)


def ratios(inputs: LossInputs, settings: Settings) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the ratio to be clipped, with gradient, the behaviour weight, and statistics of both."""
    fields, current = inputs.fields, inputs.logprobs.detach()
    behaviour = fields["behaviour_logprobs"]
    proximal = fields.get("proximal_logprobs", current)
    log_ratio = log_ratio_to_start(inputs, settings)
    if settings.importance_sampling_level == "sequence":
        log_ratio = inputs.sequences.mean(log_ratio)
    weight, stats = _behaviour_weight(inputs.sequences, proximal - behaviour, settings)
    from_behaviour, drift = current - behaviour, (proximal - behaviour).abs()
    return (
        log_ratio.clamp(-MOST_EXPONENT, MOST_EXPONENT).exp(),
        weight,
        {
            "kl": divergence(-from_behaviour, "k3"),
            **stats,
            "on_policy_share": fields["on_policy"],
            "on_policy_logprob_diff": drift * fields["on_policy"],
        },
    )


def log_ratio_to_start(inputs: LossInputs, settings: Settings) -> Tensor:
    """Return each token's log-ratio to the weights at the start of the step, or to the servers' if not decoupled."""
    behaviour = inputs.fields["behaviour_logprobs"]
    start = inputs.fields.get("proximal_logprobs", inputs.logprobs.detach())
    return inputs.logprobs - (start if settings.use_decoupled_loss else behaviour)


def _behaviour_weight(sequences: Sequences, log_weight: Tensor, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the limited ratio of proximal to behaviour probability, and statistics of the limits.

    Source: truncated by token, AReaL (arXiv 2505.24298); by sequence or masked, Liu et al., When speed kills stability
    (2025, richardli.xyz/rl-collapse); masked by token on both sides, IcePop in Ring-1T (arXiv 2510.18855); the veto,
    verl `rollout_token_veto_threshold`.
    """
    level, _, limit = settings.behave_imp_weight_mode.partition("_")
    weight, beyond = log_weight.new_ones(len(log_weight)), log_weight.new_zeros(len(log_weight))
    if not settings.use_decoupled_loss:
        return weight, {"behaviour_weight": weight, "behaviour_truncated_share": beyond}
    if level != "disabled":
        joined = {"token": lambda each: each, "sequence": sequences.sum, "geometric": sequences.mean}[level](log_weight)
        ratio, (floor, cap) = joined.clamp(-MOST_EXPONENT, MOST_EXPONENT).exp(), settings.weight_bounds
        outside = (ratio < floor) | (ratio > cap)
        weight = ratio.clamp(floor, cap) if limit == "truncate" else ratio.masked_fill(outside, 0)
        beyond = outside.to(weight.dtype)
    stats = {"behaviour_truncated_share": beyond}
    if settings.behave_imp_weight_veto:
        worst = log_weight < math.log(settings.behave_imp_weight_veto)
        vetoed = sequences.sum(worst.to(weight.dtype)) > 0
        weight, stats["behaviour_vetoed_share"] = weight.masked_fill(vetoed, 0), vetoed.to(weight.dtype)
    return weight, {"behaviour_weight": weight, **stats}


def with_regularisers(inputs: LossInputs, settings: Settings, loss: Tensor, stats: dict[str, Tensor]) -> TokenLoss:
    """Add the entropy bonus, the divergences from reference and teacher, and the policy drift, each if it has a weight.

    Source of the drift: CPGD (arXiv 2505.12504), eq. 8, whose ratio is bounded by 3.
    """
    stats = {"entropy": inputs.entropy, **stats}
    if inputs.choices is not None and settings.teacher_coef:
        taught = inputs.fields[TEACHER_TOP].clamp(min=LEAST_LOGPROB)
        stats["teacher_kl"] = forward_kl = (taught.exp() * (taught - inputs.choices)).sum(1)
        loss = loss + settings.teacher_coef * forward_kl
    if settings.entropy_coeff:
        loss = loss - settings.entropy_coeff * inputs.entropy
    if "reference_logprobs" in inputs.fields:
        log_ratio = inputs.logprobs - inputs.fields["reference_logprobs"]
        stats["reference_kl"] = divergence(log_ratio, "k3")
        if settings.kl_loss_coef:
            loss = loss + settings.kl_loss_coef * divergence(log_ratio, settings.kl_estimator or "k3")
    if settings.policy_drift_coeff:
        ratio = log_ratio_to_start(inputs, settings).detach().clamp(-MOST_EXPONENT, MOST_EXPONENT).exp()
        loss = loss + settings.policy_drift_coeff * (ratio - 1).clamp(max=2) * inputs.logprobs
    return loss, stats


@dataclass(frozen=True)
class ValueLoss:
    """Parameters of `value_loss`: values that moved further than `clip` get no gradient; None disables the clip."""

    clip: float | None


def value_loss(inputs: LossInputs, parameters: ValueLoss) -> TokenLoss:
    """Return half the squared distance of a critic's values from the returns, clipped around the earlier values.

    Fields: `values`, before the step, and `returns`.

    Source: PPO's implementation (openai/baselines, ppo2/model.py), which Huang et al. (2022), The 37 implementation
    details of PPO, describe under 9.
    """
    if inputs.values is None:
        raise ValueError(
            "value_loss needs a critic's values, and the actor's loss receives none. "
            "Give it to the algorithm as `critic`, and a loss of the policy as `loss`."
        )
    before, returns = inputs.fields["values"], inputs.fields["returns"]
    most = parameters.clip
    clipped = inputs.values if most is None else before + (inputs.values - before).clamp(-most, most)
    loss, clipped_loss = (inputs.values - returns) ** 2 / 2, (clipped - returns) ** 2 / 2
    return loss.maximum(clipped_loss), {
        "value": inputs.values,
        "return": returns,
        "clip_share": (clipped_loss > loss).to(loss.dtype),
    }


def dpo(inputs: LossInputs, parameters: None) -> TokenLoss:
    """Return the loss of direct preference optimization, linear around the weights that the step starts from.

    The two sequences of a pair may be in different micro-batches and ranks, so neither's loss can read the other's
    log-probs. Fields, the same at all tokens of a sequence, come from `presets.every_pair`: the value of the
    sequence's loss, and its slope by the sequence's log-probs. Both are exact in the first optimizer step of a batch.

    Source: DPO (arXiv 2305.18290), eq. 7.
    """
    fields = inputs.fields
    own = inputs.sequences.sum(inputs.logprobs)
    loss = fields["pair_loss"] + fields["slope"] * (own - own.detach())
    stats = {"entropy": inputs.entropy, "margin": fields["margin"], "preferred_share": fields["preferred_share"]}
    return loss, stats


def topr(inputs: LossInputs, settings: Settings) -> TokenLoss:
    """Return REINFORCE's loss, in which the ratio, at most 1, weights tokens of responses without a positive reward.

    It reads the fields of `decoupled_ppo`, and `positive`: 1 where the response has a positive reward.

    Source: TOPR (arXiv 2503.14286), eq. 8, with the ratios of tokens in place of a trajectory's.
    """
    ratio, weight, stats = ratios(inputs, settings)
    tapered = ratio.detach().clamp(max=1).masked_fill(inputs.fields["positive"] > 0, 1)
    stats["clip_share"] = ((ratio > 1) & (inputs.fields["positive"] == 0)).to(ratio.dtype)
    return with_regularisers(inputs, settings, -weight * tapered * inputs.fields["advantages"] * inputs.logprobs, stats)


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
