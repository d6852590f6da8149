"""What the engine gives a loss, and what it makes of what the loss returns."""

from __future__ import annotations

import socket
from dataclasses import replace

import numpy as np
import pytest
from tolerance import close_to
from trainer_jobs import Setting, engine, make_batch

from allocation import ParallelSizes
from areal_like.core.algorithms.losses import LossInputs, TokenLoss, decoupled_ppo, dpo, gmpo
from areal_like.core.algorithms.settings import PRESETS, Settings
from areal_like.core.trainer.engine import Rendezvous
from areal_like.core.types import LossSpec


def counting(inputs: LossInputs, parameters: float) -> TokenLoss:
    """The parameter for every token, and which sequence the token is of."""
    return inputs.logprobs * 0 + parameters, {"sequence": inputs.sequences.numbers.to(inputs.logprobs.dtype)}


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
        assert [step["sequence"] for step in steps] == close_to([sequence[trained].mean()] * 2)
        assert steps[0]["loss"] == close_to(3.0)
        assert steps[1]["loss"] == close_to(3.0 * last[trained].mean())


SEQUENCE_LOSSES = {
    "gspo": LossSpec(
        decoupled_ppo,
        Settings(eps_clip_higher=0.3, behave_imp_weight_mode="sequence_mask", importance_sampling_level="sequence"),
    ),
    "gmpo": LossSpec(gmpo, PRESETS["gmpo"]),
    "veto": LossSpec(decoupled_ppo, Settings(behave_imp_weight_veto=0.99)),
    "dpo": LossSpec(dpo),
}


def sequence_steps(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, loss: str
) -> list[dict[str, float]]:
    """Two steps of a loss that joins what is of one sequence; in the first nothing is clipped."""
    batch = make_batch()
    total = len(batch.tokens)
    near = np.full(total, -4.6, np.float32)  # an untrained model's log-probs
    behaviour = near.copy()
    behaviour[-1] += loss == "veto"  # the last token of the last sequence vetoes it
    fields = {
        **batch.fields,
        "behaviour_logprobs": behaviour,
        "proximal_logprobs": near,
        "reference_logprobs": near,
        **{name: np.ones(total, np.float32) for name in ("pair_loss", "slope", "margin", "preferred_share")},
    }
    with engine(rendezvous, listener, setting) as made:
        return [made.train(replace(batch, fields=fields), SEQUENCE_LOSSES[loss]) for _ in range(2)]


SHARED = ParallelSizes(cp=2, edp=2)


FSDP = {"backend": "fsdp"}
PLACES = {
    "context": (SHARED, {}),
    "context-fsdp": (SHARED, FSDP),
    "data": (ParallelSizes(dp=2, edp=2), {}),
    "tensors-fsdp": (ParallelSizes(tp=2), FSDP),
}


@pytest.mark.parametrize(
    ("loss", "place"),
    [
        *(("gspo", place) for place in PLACES if place != "data"),
        pytest.param("gspo", "data", marks=pytest.mark.long),
        *((loss, "context") for loss in ("gmpo", "dpo")),
        pytest.param("veto", "context", marks=pytest.mark.long),
        *(
            pytest.param(loss, place, marks=pytest.mark.long)
            for loss in ("gmpo", "veto", "dpo")
            for place in ("context-fsdp", "data", "tensors-fsdp")
        ),
    ],
)
def test_what_is_joined_by_sequence_has_the_same_gradient_wherever_its_tokens_lie(ranks, models, loss, place):
    """Over context-parallel ranks, data-parallel ones and micro-batches."""
    (alone,) = ranks.once(sequence_steps, 1, Setting(models["tied"], max_tokens_per_mb=512), loss)
    assert alone[0]["grad_norm"] > 0
    sizes, how = PLACES[place]
    for steps in ranks.run(sequence_steps, 2, Setting(models["tied"], sizes, **how), loss):
        for step, expected in zip(steps, alone, strict=True):
            assert step == close_to(expected)
