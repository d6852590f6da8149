"""What leaves the device is gone from there, and comes back as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tolerance import close_to
from trainer_jobs import CPU, GPU, Setting, three_steps, three_steps_with_offloads
from trainer_ranks import Ranks

from allocation import ParallelSizes
from areal_like.backends.training import offload
from areal_like.backends.training.offload import DeviceMemory

pytestmark = pytest.mark.covers("offload")

DP2, TP2_PP2 = ParallelSizes(dp=2, edp=2), ParallelSizes(tp=2, pp=2, etp=2)
BF16 = {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("model", "sizes", "machine", "settings"),
    [
        ("tied", DP2, BF16, {}),
        ("moe", ParallelSizes(dp=2, ep=2), BF16, {}),
        pytest.param("untied", ParallelSizes(pp=2), {}, {}, marks=pytest.mark.long),
        pytest.param("tied", DP2, BF16, {"megatron": {"use_distributed_optimizer": False}}, marks=pytest.mark.long),
        ("tied", DP2, {}, {"backend": "fsdp"}),
        pytest.param("untied", TP2_PP2, {}, {}, marks=pytest.mark.long),
    ],
    ids=["bfloat16", "experts", "pipeline", "not-distributed", "fsdp", "tensors-pipeline"],
)
def test_an_engine_that_was_offloaded_trains_as_if_it_had_not_been(
    ranks, models, tmp_path, model, sizes, machine, settings
):
    setting = Setting(models[model], sizes, machine=_machine(**machine), **settings)
    n = sizes.tp * sizes.pp * sizes.dp
    expected = ranks.run(three_steps, n, setting)
    for seen, wanted in zip(
        ranks.run(three_steps_with_offloads, n, setting, tmp_path / "state"), expected, strict=True
    ):
        assert seen.outcome.steps == wanted.steps
        for name, weight in seen.outcome.weights.items():
            np.testing.assert_array_equal(weight, wanted.weights[name], err_msg=name)
        assert seen.empty == [0, 0, 0]
        assert seen.full[1] == seen.full[2] == sum(seen.less.values())
        assert all(size > 0 for part, size in seen.less.items() if (setting.backend, part) != ("fsdp", "grads"))


def _machine(dtype: str = "float32"):
    return type(CPU)("cpu", dtype)


def test_storages_larger_than_a_block_of_host_memory_come_back_whole(monkeypatch):
    monkeypatch.setattr(offload, "_BLOCK", 1000)
    tensors = [torch.arange(n, dtype=torch.float32) for n in (3, 700, 1, 0, 250)]
    kept, view = [tensor.clone() for tensor in tensors], tensors[1][100:200]
    memory = DeviceMemory(torch.device("cpu"), {"params": lambda: tensors, "grads": tuple, "optimizer": lambda: [view]})
    for _ in range(3):
        memory.offload()
        assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0] * 5
        memory.onload()
        assert all(torch.equal(tensor, before) for tensor, before in zip(tensors, kept, strict=True))
        assert torch.equal(view, kept[1][100:200])
    assert len(memory._hosts["params"]) == 4
    assert memory._hosts["optimizer"] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("model", "backend"), [("tied", "megatron"), ("moe", "megatron"), ("tied", "fsdp")])
def test_a_gpu_gets_its_memory_back(models, tmp_path, model, backend):
    setting = Setting(models[model], machine=GPU, backend=backend, megatron={"use_deterministic_algorithms": True})
    pool = Ranks()
    try:
        (expected,) = pool.run(three_steps, 1, setting)
        (seen,) = pool.run(three_steps_with_offloads, 1, setting, tmp_path / "state")
    finally:
        pool.close()
    print(model, backend, seen.full, seen.less, seen.empty, seen.freed, seen.left)
    assert seen.outcome.steps == [close_to(step) for step in expected.steps]
    assert seen.empty == [0, 0, 0]
    assert all(seen.freed[part] >= size > 0 for part, size in seen.less.items() if (backend, part) != ("fsdp", "grads"))
    assert set(seen.left.values()) == {0}
