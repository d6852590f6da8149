"""Custom algorithm: REINFORCE with the batch's mean reward as the baseline.

    python examples/math/gsm8k_rl.py --config examples/math/gsm8k_grpo_cpu.yaml \
        algorithm=examples/own_algorithm/reinforce.py:make actor.ppo_n_minibatches=1
"""

from areal_like.core.algorithms.types import Algorithm
from areal_like.core.types import LossSpec


def targets(experience):
    """Return one number per trajectory; token fields, such as `behaviour_logprobs`, are in `experience.batch`."""
    return {"advantages": experience.rewards - experience.rewards.mean()}


def loss(inputs, cap):
    """Return the loss of every token, and statistics that are recorded under their names."""
    weight = (inputs.logprobs.detach() - inputs.fields["behaviour_logprobs"]).exp().clamp(max=cap)
    return -weight * inputs.fields["advantages"] * inputs.logprobs, {"entropy": inputs.entropy, "weight": weight}


def make(config):
    return Algorithm(targets, LossSpec(loss, config.actor.behave_imp_weight_cap or 5.0))
