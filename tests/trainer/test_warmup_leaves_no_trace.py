"""A warm-up step leaves no trace: the steps that follow are the same to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from trainer_jobs import Machine, Setting, steps_after_warmup

from allocation import ParallelSizes
from areal_like.backends.training.base import keep_state


@pytest.mark.parametrize(
    ("model", "sizes", "more"),
    [
        pytest.param("tied", ParallelSizes(dp=2, edp=2), {}, marks=pytest.mark.long),
        ("tied", ParallelSizes(pp=2, vpp=2), {"machine": Machine("cpu", "bfloat16")}),
        ("moe", ParallelSizes(dp=2, ep=2), {}),
        ("tied", ParallelSizes(tp=2, etp=2), {"role": "critic", "offload": True}),
        ("tied", ParallelSizes(dp=2), {"backend": "fsdp"}),
        pytest.param(
            "tied",
            ParallelSizes(dp=2, edp=2),
            {"megatron": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
            marks=pytest.mark.long,
        ),
    ],
    ids=["two ranks", "interleaved", "experts", "a critic that rests in host memory", "FSDP", "overlapping"],
)
def test_steps_after_a_warmup_step_are_those_without(ranks, models, model, sizes, more):
    setting = Setting(models[model], sizes, **more)
    without = ranks.run(steps_after_warmup, 2, setting, False)
    for seen, expected in zip(ranks.run(steps_after_warmup, 2, setting, True), without, strict=True):
        assert seen[0] == expected[0]
        for name, weight in seen[1].items():
            np.testing.assert_array_equal(weight, expected[1][name], err_msg=name)
        np.testing.assert_array_equal(seen[2], expected[2])


def test_what_a_model_counts_is_put_back():
    norm = torch.nn.BatchNorm1d(2)
    with keep_state([norm], torch.device("cpu")):
        norm(torch.ones(3, 2))
        assert norm.num_batches_tracked == 1
    assert norm.num_batches_tracked == 0
    assert norm.running_mean.tolist() == [0, 0]
