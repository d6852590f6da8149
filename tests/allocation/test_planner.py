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
from allocation.planner import Task, asynchrony, best_on, best_servers, plan_layouts, training_seconds
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
@settings(max_examples=25)
def test_every_layout_is_valid_and_fits(model, cluster, gpu, staleness):
    asked = task(model, cluster, gpu=GPUS[gpu], staleness=staleness)
    choices = plan_layouts(asked)
    assert [one.seconds for one in choices] == sorted(one.seconds for one in choices)
    for one in choices:
        work = asked.work(one.trainer.megatron, one.to_json()["sglang.mem_fraction_static"])
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
    assert shown.count(" 0.4 ") == 4
    share = shown.partition("sglang.mem_fraction_static=")[2].partition(";")[0]
    layout = next(word for word in shown.split() if "|" in word)
    words = ["memory", layout, *model, "--length", "9216"]
    assert CliRunner().invoke(app, [*words, "--mem-fraction-static", share]).exit_code == 0
    assert CliRunner().invoke(app, words).exit_code == 1


def test_sequences_beyond_the_models_positions_are_told_before_planning(monkeypatch):
    monkeypatch.setattr("allocation.planner.plan_layouts", None)
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
