"""The arithmetic of the trainer's benchmark: kernels and idle time of a profile, FLOPs of a step."""

from __future__ import annotations

import numpy as np
import pytest

from allocation import load_model
from allocation.parameters import active_parameters, vocabulary
from benchmarks import step_figures
from benchmarks.step_figures import Event, share_of_peak, table


def test_a_profile_counts_kernels_launches_and_idle_time():
    found = table(
        [
            Event("cudaLaunchKernel", 0, 1_000_000, False),
            Event("void at::native::(anonymous namespace)::add<float, Op<2>>(int)", 1_000_000, 3_000_000, True),
            Event("void cutlass::device_kernel<at::X<1>>(Params)", 2_000_000, 4_000_000, True),
            Event("Memcpy DtoH (Device -> Pinned)", 6_000_000, 8_000_000, True),
            Event("cudaEventRecord", 8_000_000, 10_000_000, False),
        ]
    )
    assert (found["kernels"], found["launches"], found["copies"]) == (2, 1, 1)
    assert found["busy_seconds"] == 0.005 and found["idle_share"] == 0.5
    assert {name for name, *_ in found["longest"]} == {"add", "device_kernel"}


def test_the_share_of_peak_counts_active_parameters_rows_and_scores(monkeypatch):
    monkeypatch.setattr(step_figures, "_peak", lambda: 1e12)
    model, lengths = load_model("qwen3-30b-a3b"), np.int32([1000, 3000])
    head, share = vocabulary(model), share_of_peak(load_model("qwen3-30b-a3b"), lengths, 500, 1000.0, passes=3, gpus=1)
    products = (active_parameters(model) - head) * 4000 + head * 500
    products += model.layers * model.query_width * (1000**2 + 3000**2)  # half of the scores, twice: QK' and PV
    assert share == pytest.approx(6 * products / 1e15, abs=1e-4)


def test_a_cpu_has_no_share_of_peak():
    assert share_of_peak(load_model("qwen3-8b"), np.int32([8]), 8, 1.0, passes=1, gpus=1) is None
