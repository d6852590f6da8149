"""Losses as pure functions on flat tensors; every tensor is `[tokens]`, one value per predicted token.

A loss takes LossInputs and its own parameters. It returns the loss of every token and statistics of every token, under
names of its own; the engine averages both over the tokens whose `loss_mask` is 1, over all ranks. The controller
imports these functions to name them, so torch is imported for its types alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

type TokenLoss = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class LossInputs:
    """What the engine gives a loss.

    `logprobs` are the current policy's, with gradient, and `entropy` its entropy; `fields` are the batch's; `sequences`
    is the number of each token's sequence in the batch. A critic's loss gets `values`, with gradient, instead: its
    `logprobs` and `entropy` are empty.
    """

    logprobs: Tensor
    entropy: Tensor
    fields: Mapping[str, Tensor]
    sequences: Tensor
    values: Tensor | None = None


@dataclass(frozen=True)
class DecoupledPPO:
    """Parameters of `decoupled_ppo`: the ratio's clip range is 1 - `clip_low` to 1 + `clip_high`.

    `behaviour_cap` is where the behaviour weight is truncated.
    """

    clip_low: float
    clip_high: float
    behaviour_cap: float


def sft(inputs: LossInputs, parameters: None) -> TokenLoss:
    """Negative log-likelihood of the given tokens."""
    return -inputs.logprobs, {"entropy": inputs.entropy}


def decoupled_ppo(inputs: LossInputs, parameters: DecoupledPPO) -> TokenLoss:
    """PPO that is clipped against the proximal policy and weighted by how far that is from the behaviour policy.

    Fields: `advantages`, `behaviour_logprobs` (the servers', temperature applied), `on_policy` (1 where the token was
    made with the weights that the step starts from), and `proximal_logprobs` (the weights that the step starts from);
    without the last the current policy is the proximal one, which is exact for the first optimizer step of a batch.

    Source: AReaL (arXiv 2505.24298), eq. 5; clip-higher from DAPO (arXiv 2503.14476); kl is Schulman's k3 estimator.
    """
    fields, current = inputs.fields, inputs.logprobs.detach()
    advantages, behaviour = fields["advantages"], fields["behaviour_logprobs"]
    proximal = fields.get("proximal_logprobs", current)

    ratio = (inputs.logprobs - proximal).exp()
    clipped = ratio.clamp(1 - parameters.clip_low, 1 + parameters.clip_high)
    weight = (proximal - behaviour).exp()
    truncated = weight.clamp(max=parameters.behaviour_cap)
    surrogate, clipped_surrogate = ratio * advantages, clipped * advantages
    loss = -truncated * surrogate.minimum(clipped_surrogate)

    from_behaviour = current - behaviour
    drift = (proximal - behaviour).abs()
    return loss, {
        "entropy": inputs.entropy,
        "kl": from_behaviour.exp() - 1 - from_behaviour,
        "clip_share": (clipped_surrogate < surrogate).to(loss.dtype),
        "behaviour_weight": truncated,
        "behaviour_truncated_share": (weight > truncated).to(loss.dtype),
        "on_policy_share": fields["on_policy"],
        "on_policy_logprob_diff": drift * fields["on_policy"],
    }
