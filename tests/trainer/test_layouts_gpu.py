"""The table of layouts on GPUs, in bfloat16: every one trains as one rank does, up to rounding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from test_gpu import hf_log_probs, setting
from test_layouts import LAYOUTS, MORE_LAYOUTS, assembled, world
from trainer_jobs import (
    Setting,
    adapted_steps,
    moved_reference,
    resume,
    save_after_two_steps,
    steps_with_groups,
    three_steps,
)
from trainer_ranks import Ranks

from allocation import ParallelSizes
from areal_like.core.trainer.engine import LoRA

pytestmark = pytest.mark.gpu

ROUNDING_TOLERANCE, OF_CUT_EXPERTS = 1.5, 2  # of log-probs, over one rank's; parts of an expert are rounded, then added
STEP_TOLERANCE = 0.05  # of loss and gradient norm: bfloat16 keeps 8 bits, and sums come in another order
WEIGHT_TOLERANCE = 2e-3  # mean of absolute differences after three steps of 1e-3

TWO_GPUS = [
    ("moe", ParallelSizes(tp=2, ep=2), "mbridge"),
    ("moe", ParallelSizes(cp=2, ep=2), "megatron-bridge"),
    ("moe", ParallelSizes(pp=2), "megatron-bridge"),
    ("moe", ParallelSizes(tp=2, etp=2), "mbridge"),
]
FSDP = [
    ("tied", ParallelSizes(tp=2, edp=2)),
    ("untied", ParallelSizes(dp=2, tp=2, edp=4)),
    ("untied", ParallelSizes(cp=2, tp=2, edp=4)),
    ("tied", ParallelSizes()),
    ("untied", ParallelSizes(dp=2, edp=2)),
    ("tied", ParallelSizes(cp=2, edp=2)),
    ("untied", ParallelSizes(dp=2, cp=2, edp=4)),
    ("tied", ParallelSizes(cp=4, edp=4)),
]
ROWS = [*((*row, "mbridge") for row in LAYOUTS), *TWO_GPUS, *(row for row in MORE_LAYOUTS if world(row[1]) <= 4)]


@pytest.fixture(scope="module")
def gpus():
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def one_rank(gpus, models):
    return cache(lambda model: gpus.run(three_steps, 1, setting(models[model]))[0])


@pytest.fixture(scope="module")
def exact(models):
    return cache(lambda model: hf_log_probs(models[model], torch.float32))


@pytest.mark.parametrize(
    ("model", "sizes", "backend"),
    [
        *(
            pytest.param(
                *row, marks=pytest.mark.skipif(torch.cuda.device_count() < world(row[1]), reason="needs more GPUs")
            )
            for row in [*ROWS, *((*row, "fsdp") for row in FSDP)]
        )
    ],
    ids=lambda x: x if isinstance(x, str) else str(x).removeprefix("ParallelSizes"),
)
def test_layout_trains_as_one_rank_does(gpus, models, one_rank, exact, model, sizes, backend):
    made = setting(models[model])
    if backend == "fsdp":
        made = Setting(made.model, sizes, backend="fsdp", machine=made.machine, optimizer=made.optimizer)
    else:
        made = Setting(made.model, sizes, bridge=backend, machine=made.machine, optimizer=made.optimizer)
    expected, outcomes = one_rank(model), gpus.run(three_steps, world(sizes), made)
    log_probs, reference = assembled(outcomes), assembled([expected])
    places = ~np.isnan(reference)
    assert np.array_equal(places, ~np.isnan(log_probs))
    rounding = np.abs(reference - exact(model))[places].mean()
    tolerance = OF_CUT_EXPERTS if model == "moe" and sizes.etp > 1 else ROUNDING_TOLERANCE
    assert np.abs(log_probs - exact(model))[places].mean() < tolerance * rounding
    for outcome in outcomes:
        for step, wanted in zip(outcome.steps, expected.steps, strict=True):
            assert step["loss"] == pytest.approx(wanted["loss"], rel=STEP_TOLERANCE, abs=STEP_TOLERANCE)
            assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=STEP_TOLERANCE)
    assert outcomes[0].weights.keys() == expected.weights.keys()
    for name, weight in outcomes[0].weights.items():
        assert np.abs(weight - expected.weights[name]).mean() < WEIGHT_TOLERANCE, name


def alike(weights: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert np.abs(weight - expected[name]).mean() < WEIGHT_TOLERANCE, name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("model", "sizes", "backend"),
    [
        ("tied", ParallelSizes(tp=2, etp=2), "megatron"),
        ("untied", ParallelSizes(pp=2), "megatron"),
        ("moe", ParallelSizes(dp=2, ep=2), "megatron"),
        ("tied", ParallelSizes(cp=2, edp=2), "fsdp"),
    ],
    ids=str,
)
def test_responses_to_a_prompt_that_is_computed_once_train_alike(gpus, models, model, sizes, backend):
    made = replace(setting(models[model]), sizes=sizes, backend=backend, max_tokens_per_mb=128)
    whole, shared = (gpus.run(steps_with_groups, 2, replace(made, share_prompts=it))[0] for it in (False, True))
    for step, wanted in zip(shared.steps, whole.steps, strict=True):
        assert step["loss"] == pytest.approx(wanted["loss"], rel=STEP_TOLERANCE, abs=STEP_TOLERANCE)
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=STEP_TOLERANCE)
    alike(shared.weights, whole.weights)


@pytest.fixture
def two_ranks(models):
    """FSDP with its shards on the GPUs, and in host memory."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    made = replace(setting(models["tied"]), sizes=ParallelSizes(dp=2, edp=2), backend="fsdp")
    return made, replace(made, fsdp={"offload_params": True})


def test_shards_in_host_memory_train_alike(gpus, two_ranks, tmp_path):
    expected, outcome = (gpus.run(three_steps, 2, made)[0] for made in two_ranks)
    for step, wanted in zip(outcome.steps, expected.steps, strict=True):
        assert step["loss"] == pytest.approx(wanted["loss"], rel=STEP_TOLERANCE, abs=STEP_TOLERANCE)
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=STEP_TOLERANCE)
    alike(outcome.weights, expected.weights)
    steps = gpus.run(save_after_two_steps, 2, two_ranks[1], tmp_path)[0]
    assert gpus.run(resume, 2, two_ranks[1], tmp_path)[0] == [pytest.approx(step, rel=1e-3) for step in steps]


def test_adapters_in_host_memory_train_alike(gpus, two_ranks):
    lora = LoRA(rank=8, alpha=16, targets=("all-linear",))
    expected, outcome = (gpus.run(adapted_steps, 2, replace(made, lora=lora))[0] for made in two_ranks)
    alike(outcome.adapters, expected.adapters)
    alike(outcome.weights, expected.weights)


def test_a_reference_in_host_memory_moves_alike(gpus, two_ranks, models, tmp_path):
    expected, outcome = (
        gpus.run(moved_reference, 2, made, models["untied"], tmp_path / str(number))[0]
        for number, made in enumerate(two_ranks)
    )
    alike(outcome[0], expected[0])
