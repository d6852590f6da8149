"""What the engine gives a loss, and what it makes of what the loss returns."""

from __future__ import annotations

import socket
from dataclasses import replace

import numpy as np
import pytest
from trainer_jobs import Setting, engine, make_batch

from allocation import ParallelSizes
from areal_like.algorithms.losses import LossInputs, TokenLoss
from areal_like.trainer.engine import Rendezvous
from areal_like.types import LossSpec


def counting(inputs: LossInputs, parameters: float) -> TokenLoss:
    """The parameter for every token, and which sequence the token is of."""
    return inputs.logprobs * 0 + parameters, {"sequence": inputs.sequences.to(inputs.logprobs.dtype)}


def losses_by_weight(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, weights: list[np.ndarray | None]
) -> list[dict[str, float]]:
    """One step for each of the weights."""
    batch = make_batch()
    with engine(rendezvous, listener, setting) as made:
        return [
            made.train(
                batch if given is None else replace(batch, fields={**batch.fields, "loss_weights": given}),
                LossSpec(counting, 3.0),
            )
            for given in weights
        ]


@pytest.mark.parametrize("sizes", [ParallelSizes(), ParallelSizes(cp=2, edp=2)], ids=["one", "context"])
def test_loss_weights_count_and_sequences_are_numbered_as_in_the_batch(ranks, models, sizes):
    batch = make_batch()
    sequence = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    trained = batch.fields["loss_mask"] > 0
    trained[np.cumsum(batch.lengths) - batch.lengths] = False  # nothing predicts them
    last = (sequence == 7).astype(np.float32)
    for steps in ranks.run(losses_by_weight, sizes.cp, Setting(models["tied"], sizes), [None, last]):
        assert [step["sequence"] for step in steps] == pytest.approx([sequence[trained].mean()] * 2)
        assert steps[0]["loss"] == pytest.approx(3.0)
        assert steps[1]["loss"] == pytest.approx(3.0 * last[trained].mean())
