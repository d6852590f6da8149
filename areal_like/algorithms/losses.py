"""Losses as pure functions on flat tensors; every tensor is `[tokens]`, one value per predicted token.

A loss takes the current policy's log-probs (with gradient), its entropy, the batch's fields and the loss's
parameters. It returns the loss of every token and statistics of every token; the engine averages both over the tokens
whose `loss_mask` is 1, over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

TokenLoss = tuple[Tensor, dict[str, Tensor]]
Loss = Callable[[Tensor, Tensor, Mapping[str, Tensor], Mapping[str, float]], TokenLoss]


def sft(logprobs: Tensor, entropy: Tensor, fields: Mapping[str, Tensor], parameters: Mapping[str, float]) -> TokenLoss:
    """Negative log-likelihood of the given tokens."""
    return -logprobs, {"entropy": entropy}


def policy(
    logprobs: Tensor, entropy: Tensor, fields: Mapping[str, Tensor], parameters: Mapping[str, float]
) -> TokenLoss:
    """Decoupled PPO: clipped against the proximal policy, weighted by how far that is from the behaviour policy.

    Fields: `advantages`, `behaviour_logprobs` (the servers', temperature applied), `on_policy` (1 where the token was
    made with the weights that the step starts from), and `proximal_logprobs` (the weights that the step starts from);
    without the last the current policy is the proximal one, which is exact for the first optimizer step of a batch.
    Parameters: `eps_clip`, `eps_clip_higher`, `behave_imp_weight_cap` (the behaviour weight is truncated there).

    Source: AReaL (arXiv 2505.24298), eq. 5; clip-higher from DAPO (arXiv 2503.14476); kl is Schulman's k3 estimator.
    """
    advantages, behaviour = fields["advantages"], fields["behaviour_logprobs"]
    current = logprobs.detach()
    proximal = fields.get("proximal_logprobs", current)

    ratio = (logprobs - proximal).exp()
    clipped = ratio.clamp(1 - parameters["eps_clip"], 1 + parameters["eps_clip_higher"])
    weight = (proximal - behaviour).exp()
    truncated = weight.clamp(max=parameters["behave_imp_weight_cap"])
    surrogate, clipped_surrogate = ratio * advantages, clipped * advantages
    loss = -truncated * surrogate.minimum(clipped_surrogate)

    from_behaviour = current - behaviour
    drift = (proximal - behaviour).abs()
    return loss, {
        "entropy": entropy,
        "kl": from_behaviour.exp() - 1 - from_behaviour,
        "clip_share": (clipped_surrogate < surrogate).to(loss.dtype),
        "behaviour_weight": truncated,
        "behaviour_truncated_share": (weight > truncated).to(loss.dtype),
        "on_policy_share": fields["on_policy"],
        "on_policy_logprob_diff": drift * fields["on_policy"],
    }


LOSSES: dict[str, Loss] = {"sft": sft, "policy": policy}
