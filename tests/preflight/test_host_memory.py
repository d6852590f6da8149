"""A run that the machine's memory cannot hold is refused before it starts, and the suggested keys make it fit."""

import re
from pathlib import Path

import pytest

from areal_like.config.load import load
from areal_like.preflight import host_memory
from areal_like.preflight.host_memory import check_host_memory, host_items, machine_bytes
from areal_like.preflight.layout import find_plan
from areal_like.preflight.model import find_model

CPU = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_cpu.yaml"
GPU = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_qwen3_0.6b.yaml"
SMOLLM2 = ["hidden_size=576", "num_hidden_layers=30", "intermediate_size=1536", "head_dim=64", "num_attention_heads=9",
           "num_key_value_heads=3", "max_position_embeddings=2048"]  # fmt: skip
LONG = ["gconfig.max_new_tokens=512", *(f"actor.init_model.{size}" for size in SMOLLM2)]


def checked(monkeypatch, gib, *overrides, file=CPU, device="cpu", available=None):
    monkeypatch.setattr(host_memory, "machine_bytes", lambda: (gib << 30, (available or gib) << 30))
    config = load(file, list(overrides)).config
    model = find_model(config)[0]
    plan, found = find_plan(config, model)
    assert plan is not None, found
    return list(check_host_memory(config, device, plan, {"actor": model}))


def test_the_demo_fits(monkeypatch):
    assert checked(monkeypatch, 8) == []


def test_the_demo_is_counted_as_measured():
    """3.0 GiB of all processes were measured; micro-batches that are not full need less than is counted."""
    config = load(CPU, []).config
    model = find_model(config)[0]
    plan, _ = find_plan(config, model)
    need = sum(item.bytes for item in host_items(config, "cpu", plan, {"actor": model}, 64 << 30))
    assert 3.0 < need / 2**30 < 4.6


def test_a_model_that_the_kernel_would_kill_is_refused(monkeypatch):
    (found,) = checked(monkeypatch, 24, *LONG)
    assert (found.code, str(found.severity)) == ("RUN-HOST-MEMORY", "error")
    settings = re.findall(r"[\w.]+=\d+", found.help)
    assert settings
    assert checked(monkeypatch, 24, *LONG, *settings) == []


def test_memory_that_others_use_is_a_warning(monkeypatch):
    (found,) = checked(monkeypatch, 128, *LONG, available=16)
    assert (found.code, str(found.severity)) == ("RUN-HOST-MEMORY-TAKEN", "warning")


@pytest.mark.parametrize("gib", [1, 1024])
def test_other_machines_are_not_judged(monkeypatch, gib):
    assert checked(monkeypatch, gib, *LONG, "scheduler.type=ray") == []


def test_offloaded_state_is_counted(monkeypatch):
    monkeypatch.setattr(host_memory, "gpu_count", lambda: 1)
    shape = ["hidden_size=4096", "num_hidden_layers=36", "num_attention_heads=32", "intermediate_size=12288"]
    larger = ["device=cuda", "recover.mode=off", *(f"actor.init_model.{size}" for size in shape)]
    assert checked(monkeypatch, 64, *larger, file=GPU, device="cuda") == []
    for offload in ("actor.offload=true", "actor.megatron.optimizer_offload=true", "rollout.sharing=alternate"):
        found = checked(monkeypatch, 64, *larger, offload, file=GPU, device="cuda")
        assert [one.code for one in found] == ["RUN-HOST-MEMORY"]


def test_a_checkpoints_copy_is_limited(monkeypatch):
    monkeypatch.setattr(host_memory, "gpu_count", lambda: 1)
    shape = ["hidden_size=4096", "num_hidden_layers=36", "num_attention_heads=32", "intermediate_size=12288"]
    larger = ["device=cuda", "recover.mode=auto", *(f"actor.init_model.{size}" for size in shape)]
    (found,) = checked(monkeypatch, 64, *larger, file=GPU, device="cuda")
    assert found.code == "RUN-HOST-MEMORY" and "recover.host_copy_gb=0" in found.help
    assert checked(monkeypatch, 64, *larger, "recover.host_copy_gb=0", file=GPU, device="cuda") == []
    (found,) = checked(monkeypatch, 64, *larger, "recover.host_copy_gb=80", file=GPU, device="cuda")
    assert found.code == "RUN-HOST-MEMORY"


def needs(*overrides, file=GPU, device="cuda"):
    config = load(file, list(overrides)).config
    model = find_model(config)[0]
    plan, found = find_plan(config, model)
    assert plan is not None, found
    return {item.name: item.bytes for item in host_items(config, device, plan, {"actor": model}, 64 << 30)}


def test_data_in_flight_grows_with_the_staleness_bound():
    one, two = (needs("device=cuda", f"rollout.max_head_offpolicyness={most}") for most in (1, 3))
    assert two["trajectories in flight"] == 2 * one["trajectories in flight"] > 0
    assert two["Ray's object store"] == one["Ray's object store"] > 0
    assert "routes" not in one


def test_more_ranks_need_more():
    config = load(CPU, []).config
    model = find_model(config)[0]
    needs = []
    for ranks in (1, 2):
        config = load(CPU, [f"actor.backend=megatron:d{ranks}"]).config
        plan, _ = find_plan(config, model)
        needs.append(sum(item.bytes for item in host_items(config, "cpu", plan, {"actor": model}, 64 << 30)))
    assert needs[1] > needs[0] + host_memory.RANK_BYTES


def test_the_machine_is_read():
    total, available = machine_bytes()
    assert 1 << 28 < available <= total < 1 << 46
