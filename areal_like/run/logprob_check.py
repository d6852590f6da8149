"""The gate before the first step: trainer and servers have to compute the same model."""

from collections.abc import Sequence

import numpy as np

from areal_like.config.schema import RunConfig
from areal_like.errors import LogprobMismatch
from areal_like.trainer.remote import Trainer
from areal_like.types import Batch, Trajectory

# Nats, as `rollout.max_logprob_diff` has it. Equal models are 1e-6 apart in float32, 0.002 to 0.007 in bfloat16
# (benchmarks/results), and more with experts, whose routing flips at ties. Wrong rope in float32 gave 0.058 and more.
ROUNDING = {"float32": 1e-3, "bfloat16": 0.1}
RESPONSES = 16  # the longest ones: some kinds of rope differ only there


def allowed_logprob_diff(config: RunConfig) -> float:
    """The largest mean distance, in nats, that is taken for rounding."""
    return config.rollout.max_logprob_diff or ROUNDING[config.actor.dtype]


async def check_logprobs(config: RunConfig, trainer: Trainer, trajectories: Sequence[Trajectory]) -> None:
    """Compare the log-probs of responses that servers with the trainer's weights have generated.

    Raises LogprobMismatch where the mean distance is more than rounding (`rollout.max_logprob_diff`).
    """
    longest = sorted(trajectories, key=lambda item: len(item.tokens))[-RESPONSES:]
    lengths = np.array([len(item.tokens) for item in longest], np.int32)
    tokens, behaviour, generated = (
        np.concatenate([getattr(item, name) for item in longest]) for name in ("tokens", "logprobs", "generated")
    )
    trained = await trainer.log_probs(Batch(lengths, tokens), config.gconfig.temperature)
    compared = generated & ~np.isnan(behaviour)  # those of data are not known (Rollout.given)
    if not compared.any():
        return
    measured = float(np.abs(trained - behaviour)[compared].mean())
    allowed = allowed_logprob_diff(config)
    if not measured <= allowed:  # nan is not
        raise LogprobMismatch(len(longest), measured, allowed)
