"""A run that its GPUs cannot hold is refused before it starts, with the keys that would change it."""

from pathlib import Path

import pytest

from areal_like.core.config.load import load
from areal_like.preflight import memory
from areal_like.preflight.layout import find_plan
from areal_like.preflight.model import find_model

EXAMPLE = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_qwen3_0.6b.yaml"


def findings(*overrides):
    config = load(EXAMPLE, ["device=cuda", *overrides]).config
    plan, found = find_plan(config, find_model(config)[0])
    assert (plan is None) == any(finding.severity == "error" for finding in found)
    return {finding.code: finding for finding in found}


@pytest.mark.parametrize("gib", [24, 80, None])
def test_a_gpu_that_is_too_small_is_told(monkeypatch, gib):
    monkeypatch.setattr(memory, "gpu_bytes", lambda: gib and gib << 30)
    found = findings()
    assert ("ALLOC-MEMORY" in found) == (gib == 24)
    if gib == 24:
        options = [word for word in found["ALLOC-MEMORY"].help.split() if "=" in word]
        assert options
        assert all(word.startswith(("actor.", "sglang.")) for word in options)
        assert "ALLOC-MEMORY" not in findings(*options)


def test_the_driver_is_asked(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 81559\necho 143771\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert memory.gpu_bytes() == 81559 << 20
    program.write_text("#!/bin/sh\nexit 9\n")
    assert memory.gpu_bytes() is None


@pytest.mark.parametrize(
    ("needs", "role"),
    [
        (
            ["actor.backend=fsdp:d1", "actor.fsdp.offload_params=true"],
            "backend: 'fsdp:d1', fsdp: {offload_params: false}",
        ),
        (["actor.backend=megatron:d1"], "backend: 'megatron:d1', dtype: float32"),
    ],
)
def test_a_role_is_counted_by_its_own_keys(monkeypatch, needs, role):
    """A critic that is as the actor would fit on its GPU."""
    monkeypatch.setattr(memory, "gpu_bytes", lambda: 15 << 30)
    layout = ["allocation_mode=null", "rollout.backend=sglang:d1", "cluster.n_gpus_per_node=3", "algorithm=ppo", *needs]
    apart = "scheduling_strategy: {type: separation}"
    few = "actor.mb_spec.max_tokens_per_mb=2048"
    assert "ALLOC-MEMORY" not in findings(*layout, few, f"critic={{backend: '{needs[0].partition('=')[2]}', {apart}}}")
    assert "critic needs" in findings(*layout, few, f"critic={{{role}, {apart}}}")["ALLOC-MEMORY"].message


WHOLE = ["allocation_mode=sglang[rollout]:d1+megatron[actor]:d1"]
BY_ROLE = ["allocation_mode=null", "rollout.backend=sglang:d1", "actor.backend=megatron:d1"]


@pytest.mark.parametrize("role", ["critic", "ref"])
@pytest.mark.parametrize(
    ("without", "written"),
    [(WHOLE, [f"{WHOLE[0]}|megatron[ROLE]:d1"]), (BY_ROLE, [*BY_ROLE, "ROLE.backend=megatron:d1"])],
)
def test_a_role_without_a_layout_is_counted_on_the_actors_gpus(monkeypatch, role, without, written):
    monkeypatch.setattr(memory, "gpu_bytes", lambda: 16 << 30)
    run = ["cluster.n_gpus_per_node=2", "algorithm=ppo", f"{role}.dtype=bfloat16"]
    found = findings(*run, *without)["ALLOC-MEMORY"]
    assert f"actor and {role} together need" in found.message
    assert len(found.spans) == 1
    assert found.message == findings(*run, *(text.replace("ROLE", role) for text in written))["ALLOC-MEMORY"].message


@pytest.mark.parametrize("trained", [True, False])
def test_a_layer_for_prediction_is_counted_where_the_actor_trains_it(monkeypatch, trained):
    monkeypatch.setattr(memory, "gpu_bytes", lambda: 80 << 30)
    config = load(EXAMPLE, ["device=cuda", f"actor.megatron.train_mtp_layers={str(trained).lower()}"]).config
    assert memory.memory_settings(config, None).mtp_trained == trained
