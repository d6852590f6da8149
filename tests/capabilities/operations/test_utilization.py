"""MFU and tokens per GPU-second against the planner's FLOPs, and against a count by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import allocation
from allocation import BatchSpec, Cluster
from allocation.hardware import GPUS
from allocation.planner.seconds import _flops_per_token
from allocation.planner.task import Task
from areal_like.capabilities.operations import hook
from areal_like.capabilities.operations.hook import Utilization, make_utilization

PROMPT, RESPONSE, SECONDS = 256.0, 1024.0, 20.0
STEP = {
    "seconds/step": SECONDS,
    "train/tokens": 1e6,
    "throughput/rollout_tokens_per_second": 4000.0,
    "rollout/response_length": RESPONSE,
}


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b"])
def test_the_trainers_flops_are_the_planners(name: str) -> None:
    model, flops = allocation.load_model(name), GPUS["h100"].flops
    task = Task(model, Cluster(1, 8), batch=BatchSpec(64, 8), prompt=int(PROMPT), response=int(RESPONSE))
    response = task.generated / task.batch.sequences
    scalars = STEP | {"rollout/response_length": response}
    found = Utilization(4, 2, model, flops).of_step(scalars, task.tokens / task.batch.sequences - response)
    assert found["mfu/trainer"] * SECONDS * 4 * flops / 1e6 == pytest.approx(6 * _flops_per_token(task), rel=1e-9)
    assert found["throughput/train_tokens_per_gpu_second"] == 1e6 / SECONDS / 4
    assert found["throughput/rollout_tokens_per_gpu_second"] == 2000.0


def test_a_count_by_hand() -> None:
    model = allocation.load_model("qwen3-8b")
    h, layers, heads, kv, dim, ffn, words = 4096, 36, 32, 8, 128, 12288, 151936
    matrices = layers * (h * dim * (2 * heads + 2 * kv) + 3 * h * ffn)
    length = PROMPT + RESPONSE
    attention = layers * 2 * 2 * (length / 2) * heads * dim  # scores and values, each a product, half of them masked
    forward = 2 * matrices + attention + 2 * h * words * RESPONSE / length
    found = Utilization(1, 1, model, 1e15).of_step(STEP, PROMPT)
    assert found["mfu/trainer"] == pytest.approx(3 * forward * 1e6 / SECONDS / 1e15, rel=0.001)
    served = 2 * matrices + layers * 4 * (PROMPT + RESPONSE / 2) * heads * dim + 2 * h * words
    assert found["mfu/servers"] == pytest.approx(served * 4000 / 1e15, rel=0.001)


def test_without_a_known_gpu_there_are_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "gpu_bytes", lambda: None)
    plan = allocation.compile("sglang:d2+megatron:d4")
    job: Any = SimpleNamespace(device="cuda", plan=plan, models={"actor": allocation.load_model("qwen3-8b")})
    made = make_utilization(job)
    assert made is not None and (made.trainer, made.servers) == (4, 2)
    assert set(made.of_step(STEP, PROMPT)) == {
        "throughput/train_tokens_per_gpu_second",
        "throughput/rollout_tokens_per_gpu_second",
    }
    job.device = "cpu"
    assert make_utilization(job) is None
