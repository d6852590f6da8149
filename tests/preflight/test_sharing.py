"""Trainer and servers share GPUs in a way that can work, or are refused before anything starts."""

from pathlib import Path

import pytest
from known import excluded

from areal_like.config.load import load
from areal_like.preflight import memory, sharing
from areal_like.preflight.layout import find_plan
from areal_like.preflight.model import find_model
from areal_like.preflight.sharing import check_sharing, describe_sharing

EXAMPLE = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_qwen3_0.6b.yaml"
TURNS = "rollout.sharing=alternate"


def findings(*overrides: str, device: str = "cuda", layout: str = "sglang:d2|megatron:d2") -> dict[str, str]:
    where = [f"device={device}", "cluster.n_gpus_per_node=4", f"allocation_mode={layout}"]
    config = load(EXAMPLE, [*where, *overrides]).config
    plan, errors = find_plan(config, find_model(config)[0])
    assert plan is not None, errors
    found = [*check_sharing(config, device, plan), *excluded(config, device, plan=plan)]
    return {each.source.key: each.message for each in found}


@pytest.mark.parametrize("layout", ["sglang:d2|megatron:d2", "sglang:d1t2|megatron:d2", "sglang:d2|megatron:t2"])
@pytest.mark.parametrize("overrides", [["weight_update.mode=ipc"], [TURNS], [TURNS, "weight_update.mode=ipc"]])
def test_all_gpus_are_shared(layout, overrides):
    assert findings(*overrides, layout=layout) == {}


@pytest.mark.parametrize("layout", ["sglang:d1+megatron:d1", "sglang:d2@0-1|megatron:d1@0"])
def test_weights_are_lent_where_a_trainer_rank_is_on_each_gpu_of_each_server(layout):
    assert findings(layout=layout) == {}
    message = findings("weight_update.mode=ipc", layout=layout)["weight_update.mode"]
    assert "needs an actor rank on every server GPU; server " in message


def test_turns_need_gpus():
    assert "GPUs" in findings(TURNS, device="cpu")["rollout.sharing"]


@pytest.mark.parametrize("layout", ["sglang:d1+megatron:d1", "sglang:d2@0-1|megatron:d1@0"])
def test_turns_are_taken_on_the_same_gpus(layout):
    assert "different GPUs" in findings(TURNS, layout=layout)["rollout.sharing"]


def test_turns_do_not_wait_for_requests():
    assert "requests=drain" in findings(TURNS, "weight_update.requests=drain")["weight_update.requests"]


def test_turns_need_the_package_that_releases_memory(monkeypatch):
    monkeypatch.setattr(sharing, "gpu_count", lambda: 2)
    monkeypatch.setattr(sharing.importlib.util, "find_spec", lambda name: None)
    assert findings(TURNS)["rollout.sharing"] == "the package torch-memory-saver is not installed"


def test_a_dry_run_says_which_and_why(monkeypatch):
    monkeypatch.setattr(memory, "gpu_bytes", lambda: 80 << 30)
    config = load(EXAMPLE, ["device=cuda"]).config
    spec = find_model(config)[0]
    plan, _ = find_plan(config, spec)
    assert "colocated" in describe_sharing(config, plan, {"actor": spec})
    assert "of 80 GiB they need about" in describe_sharing(config, plan, {"actor": spec})


def test_a_dry_run_counts_a_role_by_its_own_keys(monkeypatch):
    monkeypatch.setattr(memory, "gpu_bytes", lambda: 160 << 30)

    def said(critic: str) -> str | None:
        config = load(EXAMPLE, ["device=cuda", "algorithm=ppo", f"critic={critic}"]).config
        spec = find_model(config)[0]
        plan, found = find_plan(config, spec)
        assert plan, found
        return describe_sharing(config, plan, {"actor": spec, "critic": spec})

    assert said("{}") == said("{dtype: bfloat16}") != said("{dtype: float32}")


def test_turns_are_proposed_where_both_do_not_fit(monkeypatch):
    """Four billion parameters and their optimizer leave a GPU of 80 GiB no room for a server with requests."""
    monkeypatch.setattr(memory, "gpu_bytes", lambda: 80 << 30)
    shape = {"hidden_size": 4096, "num_hidden_layers": 17, "num_attention_heads": 32, "intermediate_size": 12288}
    big = [f"actor.init_model.{name}={value}" for name, value in shape.items()]
    big += ["device=cuda", "sglang.mem_fraction_static=0.2", "actor.mb_spec.max_tokens_per_mb=1800"]
    big += ["actor.megatron.recompute_granularity=full", "actor.megatron.recompute_method=uniform"]
    big += ["actor.megatron.recompute_num_layers=1", "train_dataset.max_prompt_length=1024"]

    def refused(*overrides: str):
        config = load(EXAMPLE, [*big, *overrides]).config
        return {found.code: found for found in find_plan(config, find_model(config)[0])[1]}

    found = refused()["ALLOC-MEMORY"]

    assert TURNS in found.help
    assert "ALLOC-MEMORY" not in refused(TURNS)
