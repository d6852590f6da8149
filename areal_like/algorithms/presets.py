"""The algorithms that a configuration can name."""

from areal_like.algorithms.advantages import group_normalised
from areal_like.algorithms.losses import DecoupledPPO, decoupled_ppo
from areal_like.algorithms.types import Algorithm
from areal_like.config.schema import ActorConfig
from areal_like.types import LossSpec


def grpo(actor: ActorConfig) -> Algorithm:
    """GRPO's advantages with the decoupled PPO loss; the loss is averaged over all tokens of a step."""
    higher = actor.eps_clip if actor.eps_clip_higher is None else actor.eps_clip_higher
    return Algorithm(
        advantages=group_normalised,
        loss=LossSpec(decoupled_ppo, DecoupledPPO(actor.eps_clip, higher, actor.behave_imp_weight_cap)),
        needs=frozenset({"proximal"}),
    )
