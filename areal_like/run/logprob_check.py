"""The log-prob check before the first step: trainer and servers have to compute the same model."""

from collections.abc import Sequence

import numpy as np

from areal_like.algorithms.batch import batch_of
from areal_like.config.schema import RunConfig
from areal_like.errors import LogprobMismatch
from areal_like.served_form import served_form
from areal_like.trainer.remote import Trainer
from areal_like.types import Trajectory

# Nats, as `rollout.max_logprob_diff` has it. Equal models are 1e-6 apart in float32, 0.002 to 0.007 in bfloat16
# (benchmarks/results), and more with experts, whose routing flips at ties. Wrong rope in float32 gave 0.058 and more.
ROUNDING = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}
RESPONSES = 16  # the longest ones: some kinds of rope differ only there


def allowed_logprob_diff(config: RunConfig) -> float:
    """Return the largest mean distance, in nats, that is taken for rounding."""
    form = served_form(config)
    return config.rollout.max_logprob_diff or (form.logprob_diff if form else ROUNDING[config.actor.dtype])


async def check_logprobs(config: RunConfig, trainer: Trainer, trajectories: Sequence[Trajectory]) -> None:
    """Compare the log-probs of responses that servers with the trainer's weights have generated.

    The trainer computes them as it trains: the whole batch with its mask, so that prompts are shared and sequences
    packed in the same way. Raises LogprobMismatch where the mean distance, of all tokens or of the longest responses,
    is more than rounding (`rollout.max_logprob_diff`).
    """
    scored = [item for item in trajectories if item.reward is not None] or list(trajectories)
    batch = batch_of(scored, version=0)
    behaviour, mask = batch.fields["behaviour_logprobs"], batch.fields["loss_mask"] > 0
    trained = await trainer.log_probs(batch, config.gconfig.temperature)
    compared = mask & ~np.isnan(behaviour)  # tokens of data have unknown ones (Rollout.given)
    if not compared.any():
        return
    distance = np.abs(trained - behaviour)
    shortest = np.sort(batch.lengths)[-RESPONSES:][0]
    longest = compared & np.repeat(batch.lengths >= shortest, batch.lengths)
    measured = float(np.max([distance[part].mean() for part in (compared, longest) if part.any()]))  # or nan
    allowed = allowed_logprob_diff(config)
    if not measured <= allowed:  # nan is not
        raise LogprobMismatch(len(scored), measured, allowed)
