"""FSDP trains as Megatron does on one rank, on any number of ranks, with sequences shared among them or not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_layouts import TOLERANCE, assembled, log_probs_of
from trainer_jobs import (
    OptimizerConfig,
    Outcome,
    Setting,
    initial_weights,
    learning_rates,
    resume,
    save_after_two_steps,
    three_steps,
)
from transformers import AutoModelForCausalLM

from allocation import ParallelSizes

SCHEDULES = [
    {},
    {"lr_scheduler_type": "linear", "warmup_steps": 2, "min_lr_ratio": 0.1},
    {"lr_scheduler_type": "cosine", "warmup_steps": 1},
]


def fsdp(model, d: int = 1, c: int = 1, **settings) -> Setting:
    return Setting(model, ParallelSizes(dp=d, cp=c, edp=d * c), backend="fsdp", **settings)


@pytest.mark.parametrize(
    ("model", "d", "c", "settings"),
    [
        ("tied", 1, 1, {}),
        ("tied", 2, 1, {}),
        ("untied", 3, 1, {"gradient_checkpointing": True}),
        ("tied", 1, 2, {}),
        ("untied", 2, 2, {"gradient_checkpointing": True}),
        pytest.param("tied", 1, 4, {}, marks=pytest.mark.long),  # of 2 key heads: each is on two ranks
    ],
)
def test_it_trains_as_one_megatron_rank_does(ranks, models, model, d, c, settings):
    (expected,) = ranks.run(three_steps, 1, Setting(models[model]))
    alike(ranks.run(three_steps, d * c, fsdp(models[model], d, c, fsdp=settings)), expected)


def alike(outcomes: list[Outcome], expected: Outcome) -> None:
    np.testing.assert_allclose(assembled(outcomes), assembled([expected]), atol=TOLERANCE)
    for outcome in outcomes:
        for step, wanted in zip(outcome.steps, expected.steps, strict=True):
            assert step == pytest.approx(wanted, rel=TOLERANCE, abs=TOLERANCE)
    assert outcomes[0].weights.keys() == expected.weights.keys()
    for name, weight in outcomes[0].weights.items():
        np.testing.assert_allclose(weight, expected.weights[name], atol=TOLERANCE, err_msg=name)


def test_windows_and_biases_are_transformers_own_wherever_tokens_lie(ranks, models):
    (alone,) = ranks.run(three_steps, 1, fsdp(models["sliding"]))
    with torch.no_grad():
        expected = log_probs_of(AutoModelForCausalLM.from_pretrained(models["sliding"], dtype=torch.float32)).numpy()
    np.testing.assert_allclose(assembled([alone]), expected, atol=1e-4)
    alike(ranks.run(three_steps, 2, fsdp(models["sliding"], c=2)), alone)


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
    for d, c in ((1, 1), (1, 2)):
        for resumed in ranks.run(resume, d * c, fsdp(models["tied"], d, c), tmp_path):
            assert resumed == [pytest.approx(third, rel=TOLERANCE)]
    weights = ranks.run(initial_weights, 2, fsdp(tmp_path / "hf", 2))[0]
    assert weights.keys() == ranks.run(initial_weights, 1, Setting(tmp_path / "hf"))[0].keys()
