"""FSDP trains as Megatron does on one rank, on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from test_layouts import TOLERANCE, assembled
from trainer_jobs import (
    OptimizerConfig,
    Setting,
    initial_weights,
    learning_rates,
    resume,
    save_after_two_steps,
    three_steps,
)

from allocation import ParallelSizes

SCHEDULES = [
    {},
    {"lr_scheduler_type": "linear", "warmup_steps": 2, "min_lr_ratio": 0.1},
    {"lr_scheduler_type": "cosine", "warmup_steps": 1},
]


def fsdp(model, n: int = 1, **settings) -> Setting:
    return Setting(model, ParallelSizes(dp=n, edp=n), backend="fsdp", **settings)


@pytest.mark.parametrize(
    ("model", "n", "settings"),
    [("tied", 1, {}), ("tied", 2, {}), ("untied", 3, {"gradient_checkpointing": True})],
)
def test_it_trains_as_one_megatron_rank_does(ranks, models, model, n, settings):
    (expected,) = ranks.run(three_steps, 1, Setting(models[model]))
    outcomes = ranks.run(three_steps, n, fsdp(models[model], n, fsdp=settings))
    np.testing.assert_allclose(assembled(outcomes), assembled([expected]), atol=TOLERANCE)
    for outcome in outcomes:
        for step, wanted in zip(outcome.steps, expected.steps, strict=True):
            assert step == pytest.approx(wanted, rel=TOLERANCE, abs=TOLERANCE)
    assert outcomes[0].weights.keys() == expected.weights.keys()
    for name, weight in outcomes[0].weights.items():
        np.testing.assert_allclose(weight, expected.weights[name], atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_learning_rates_are_megatrons(ranks, models, schedule):
    optimizer = OptimizerConfig(lr=1e-2, **schedule)
    rates = [
        ranks.run(learning_rates, 1, setting, 1)[0]
        for setting in (
            Setting(models["tied"], optimizer=optimizer, total_steps=6),
            fsdp(models["tied"], optimizer=optimizer, total_steps=6),
        )
    ]
    assert rates[1] == pytest.approx(rates[0])


def test_a_checkpoint_goes_on_with_another_number_of_ranks(ranks, models, tmp_path):
    (third,), _ = ranks.run(save_after_two_steps, 2, fsdp(models["tied"], 2), tmp_path)
    (resumed,) = ranks.run(resume, 1, fsdp(models["tied"]), tmp_path)
    assert resumed == [pytest.approx(third, rel=TOLERANCE)]
    weights = ranks.run(initial_weights, 2, fsdp(tmp_path / "hf", 2))[0]
    assert weights.keys() == ranks.run(initial_weights, 1, Setting(tmp_path / "hf"))[0].keys()
