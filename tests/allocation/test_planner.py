"""The planner: what it offers is valid and fits, and its times move the way they must."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import allocation
from allocation import BatchSpec, Cluster
from allocation.cli import app
from allocation.hardware import GPUS, find_gpu
from allocation.model_spec import from_config
from allocation.parameters import total_parameters
from allocation.planner.asynchrony import asynchrony
from allocation.planner.search import best_each, best_on, best_servers, plan_layouts
from allocation.planner.seconds import training_seconds
from allocation.planner.task import EXPERTS, FULL, PLAIN, Task
from allocation.settings import MegatronSettings

MODELS = {name: allocation.load_model(name) for name in ("qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b", "olmoe-1b-7b-0924")}


def task(model="qwen3-8b", cluster="2x8", **changes):
    made = Task(MODELS[model], Cluster.parse(cluster), batch=BatchSpec(64, 8, max_tokens_per_mb=16384), response=4096)
    return replace(made, **changes)


@given(
    st.sampled_from(list(MODELS)),
    st.sampled_from(["1x2", "1x4", "1x8", "2x8", "3x4"]),
    st.sampled_from(["h100", "h200", "a100-40"]),
    st.sampled_from([0, 1, 4]),
)
@settings(max_examples=10)
def test_every_layout_is_valid_and_fits(model, cluster, gpu, staleness):
    asked = task(model, cluster, gpu=GPUS[gpu], staleness=staleness)
    choices = plan_layouts(asked)
    assert [one.seconds for one in choices] == sorted(one.seconds for one in choices)
    for one in choices:
        turns = one.sharing == "alternate"
        work = asked.work(one.trainer.megatron, one.servers.share, one.trainer.tokens, offload=turns)
        known = {"model": asked.model, "batch": work.batch, "memory": work.memory, "megatron": work.megatron}
        plan = allocation.compile(one.allocation, cluster=asked.cluster, **known)
        assert plan.n_gpus == asked.cluster.n_gpus
        assert one.peak <= asked.gpu.memory


@given(st.sampled_from([allocation.ParallelSizes(tp=t, pp=p, dp=2) for t in (1, 2) for p in (1, 2)]))
def test_times_move_the_way_they_must(sizes):
    asked, plain = task(), MegatronSettings()
    now = training_seconds(asked, sizes, plain)
    twice = training_seconds(asked, replace(sizes, dp=4, edp=4), plain)
    assert twice["compute"] == pytest.approx(now["compute"] / 2)
    full = MegatronSettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert training_seconds(asked, sizes, full)["compute"] > now["compute"]
    assert training_seconds(replace(asked, response=8192), sizes, plain)["compute"] > 1.5 * now["compute"]
    assert (now["bubble"] > 0) == (sizes.pp > 1) and (now["tp"] > 0) == (sizes.tp > 1)


def test_more_servers_are_quicker():
    times = [best_servers(task(), n, 0.8).seconds for n in (2, 4, 8)]
    assert times == sorted(times, reverse=True)


def test_more_nodes_are_not_slower():
    assert best_on(task(), 4).seconds < plan_layouts(task(), 1)[0].seconds


def test_synchronous_training_shares_gpus_and_waits():
    """Where responses are short beside a step, and the trainer leaves room, taking turns is best."""
    asked = task("qwen3-0.6b", "1x8", staleness=0, gpu=GPUS["h200"])
    best = plan_layouts(asked, 1)[0]
    assert best.shared and "|" in best.allocation
    assert best.seconds >= best.trainer.seconds + best.servers.seconds


def test_a_model_that_fills_its_node_is_time_shared():
    """Qwen3-30B-A3B on eight H100, as most published recipes for one node have it, and 235B on 64."""
    asked = Task(MODELS["qwen3-30b-a3b"], Cluster(1, 8), batch=BatchSpec(256, 8), staleness=0)
    best = plan_layouts(asked, 1)[0]
    assert best.sharing == "alternate" and best.trainer.recomputed
    model = ["-m", "qwen3-30b-a3b", "-g", "h100", "-b", "256x8", "--length", "9216", "--offload"]
    keys = ["--tokens", str(best.trainer.tokens), "--recompute", best.trainer.recomputed]
    on_host = ["--optimizer-offload"] * best.trainer.megatron.optimizer_offload
    assert CliRunner().invoke(app, ["memory", best.allocation, *model, *keys, *on_host]).exit_code == 0
    published = ["memory", "sglang:d1t8|megatron:(attn:d2t4|ffn:t1e8)", *model, "--recompute", "full"]
    assert CliRunner().invoke(app, published).exit_code == 0
    sizes = allocation.ParallelSizes(tp=4, dp=2, ep=8)
    assert best.trainer.seconds < sum(training_seconds(asked, sizes, FULL).values())

    larger = Task(allocation.load_model("qwen3-235b-a22b"), Cluster(8, 8), batch=BatchSpec(256, 8), staleness=0)
    best = plan_layouts(larger, 1)[0]
    assert best.sharing == "alternate" and best.servers.tp == 8 and best.trainer.sizes.pp * best.trainer.sizes.ep >= 64


def test_recomputed_experts_and_larger_micro_batches_are_as_quick_as_measured():
    """5.8B with 64 experts on one H200: 43,502 tokens a step, 13.7k and 24.0k a second without log-probs.

    Each expert had kernels of its own.
    """
    sizes = {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 64, "num_experts_per_tok": 8}
    sizes |= {"moe_intermediate_size": 768, "intermediate_size": 6144, "model_type": "qwen3_moe"}
    model = from_config({**sizes, "architectures": ["Qwen3MoeForCausalLM"], "tie_word_embeddings": False})
    assert total_parameters(model) == pytest.approx(5.758e9, rel=0.01)
    batch = BatchSpec(32, 1, max_tokens_per_mb=8192)
    gpu = replace(GPUS["h200"], groups_experts=False)
    asked = Task(model, Cluster(1, 1), gpu, batch, prompt=1958, response=761)
    for tokens, kind, measured in ((8192, PLAIN, 13_700), (16384, EXPERTS, 24_000)):
        seconds = sum(training_seconds(asked, allocation.ParallelSizes(), kind, tokens).values())
        assert asked.tokens / (0.76 * seconds) == pytest.approx(measured, rel=0.15)  # log-probs took a quarter


def test_experts_alone_are_recomputed_where_that_saves_enough():
    asked = Task(MODELS["qwen3-30b-a3b"], Cluster(4, 8), batch=BatchSpec(256, 8, max_tokens_per_mb=16384))
    best = plan_layouts(asked, 1)[0]
    assert best.keys(asked)["actor.megatron.recompute_modules"] == ("moe",)
    tried = {one.trainer.tokens for one in plan_layouts(replace(asked, batch=BatchSpec(256, 8)))}
    assert max(tried) > 16384


@pytest.mark.parametrize(
    ("model", "cluster"),
    [("qwen3-8b", "1x8"), pytest.param("qwen3-30b-a3b", "4x8", marks=pytest.mark.long), ("qwen3-0.6b", "1x8")],
)
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_claim_about_asynchrony_agrees_with_the_list(model, cluster, staleness):
    asked = task(model, cluster, staleness=staleness)
    first = plan_layouts(asked, 1)[0]
    synchronous, asynchronous = best_each(asked)
    assert first == (min(synchronous, asynchronous, key=lambda one: one.seconds) if staleness else synchronous)
    known = {one.seconds for one in plan_layouts(replace(asked, staleness=0), 1)}
    assert synchronous.seconds in known


def test_the_even_split_is_where_both_sides_take_as_long():
    asked = task()
    tide = asynchrony(asked, plan_layouts(asked, 1)[0])
    servers = tide.server_gpus
    assert tide.a / servers == pytest.approx(tide.b / (tide.gpus - servers)) == pytest.approx(tide.even)
    assert 0 <= tide.staleness <= asked.staleness


def test_command_plan():
    words = ["plan", "-m", "qwen3-8b", "-c", "1x8", "-b", "32x8", "--response", "2048", "-g", "h200"]
    shown = CliRunner().invoke(app, words, env={"COLUMNS": "120"})
    assert shown.exit_code == 0 and "Slower side" in shown.output
    layouts = json.loads(CliRunner().invoke(app, [*words, "--json", "--top", "3"]).stdout)["layouts"]
    assert len(layouts) == 3
    assert allocation.check(layouts[0]["allocation"], model="qwen3-8b", cluster=Cluster(1, 8)).ok
    small = CliRunner().invoke(app, ["plan", "-m", "qwen3-8b", "-c", "1x2", "-g", "24GiB"])
    assert small.exit_code == 1 and "no layout of Qwen/Qwen3-8B fits on 1x2" in small.stderr
    assert CliRunner().invoke(app, ["plan", "-m", "qwen3-8b"]).exit_code == 2
    assert CliRunner().invoke(app, ["plan", "-m", "qwen9", "-c", "1x8"]).exit_code == 2


def test_a_layout_fits_with_the_share_that_is_shown():
    model = ["-m", "qwen3-8b", "-c", "1x8", "-b", "128x8", "-g", "h200"]
    shown = CliRunner().invoke(app, ["plan", *model, "--staleness", "0"], env={"COLUMNS": "80"}).stdout
    layouts = [line.strip() for line in shown.splitlines() if line.startswith("     ")]
    assert len(layouts) == 8 and all(allocation.check(text, cluster=Cluster(1, 8)).ok for text in layouts)
    found = json.loads(CliRunner().invoke(app, ["plan", *model, "--staleness", "0", "--json"]).stdout)["layouts"]
    assert [one["allocation"] for one in found] == layouts
    for one in found:
        words = ["memory", one["allocation"], *model, "--length", "9216", "--tokens", str(one["max_tokens_per_mb"])]
        words += ["--recompute", one["recompute_granularity"] or "none"]
        words += ["--optimizer-offload"] * one["optimizer_offload"] + ["--offload"] * (one["sharing"] == "alternate")
        share = ["--mem-fraction-static", str(one["sglang.mem_fraction_static"])]
        assert CliRunner().invoke(app, [*words, *share]).exit_code == 0


def test_what_keeps_every_layout_from_running_is_the_first_line():
    words = ["--tokens", "16384", "-g", "h200", "-m"]
    shown = CliRunner().invoke(app, ["plan", "-c", "32x8", *words, "deepseek-v3"]).stdout
    assert shown.startswith("No layout of deepseek-ai/DeepSeek-V3 can be run") and shown.count("can be run") == 1
    assert "allocation_mode=" not in shown
    assert "No layout" not in CliRunner().invoke(app, ["plan", "-c", "1x8", *words, "qwen3-8b"]).stdout


def test_sequences_beyond_the_models_positions_are_told_before_planning(monkeypatch):
    monkeypatch.setattr("allocation.planner.search.plan_layouts", None)
    asked = CliRunner().invoke(app, ["plan", "-m", "qwen3-0.6b", "-c", "1x8", "--response", "40960", "-g", "h200"])
    assert asked.exit_code == 2
    said = " ".join(asked.stderr.replace("│", " ").split())
    assert "41,984 tokens together" in said and "40,960 positions" in said


def test_sizes_of_memory_are_gpus():
    assert find_gpu("24GiB").memory == 24 << 30
    assert find_gpu("A100").name == "a100-80"
    for wrong in ("h201", "0GiB", "24", ""):
        with pytest.raises(ValueError, match="unknown GPU"):
            find_gpu(wrong)
