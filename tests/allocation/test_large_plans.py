"""Plans of the largest models: pipelines with uneven stages, servers over several nodes, and what does not fit."""

import json
import re
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import allocation
from allocation import BatchSpec, Cluster, MegatronSettings, ParallelSizes
from allocation.cli import app
from allocation.hardware import GPUS, find_gpu
from allocation.memory import footprint_of
from allocation.parameters import stages
from allocation.pipeline import EVEN, split_words, uneven_ends
from allocation.planner.search import best_servers, layouts_of, sizes_of_trainer
from allocation.planner.shortfall import fewest_gpus, least_servers, least_trainer
from allocation.planner.task import FULL, SHARE, Task, with_ends

# Counted by hand from the published configurations: attention, router and shared experts of a layer, all its experts,
# the values that a token's attention keeps (queries, keys, values and output), and all parameters as published.
LATENT = 7168 * 576 + 1536  # keys and values, and the rotated part, compressed
BY_HAND = {
    "deepseek-v3": {
        "dense": 7168 * 1536 + 1536 * 128 * 192 + LATENT + 512 * 128 * 256 + 128 * 128 * 7168 + 7168 * (256 + 3 * 2048),
        "experts": 256 * 3 * 7168 * 2048, "chosen": 8 * (7168, 3 * 2048), "kept": 128 * (192 + 192 + 128 + 128),
        "hidden": 7168, "table": 129280 * 7168, "without_experts": 3, "published": 671e9,
    },
    "kimi-k2-instruct": {
        "dense": 7168 * 1536 + 1536 * 64 * 192 + LATENT + 512 * 64 * 256 + 64 * 128 * 7168 + 7168 * (384 + 3 * 2048),
        "experts": 384 * 3 * 7168 * 2048, "chosen": 8 * (7168, 3 * 2048), "kept": 64 * (192 + 192 + 128 + 128),
        "hidden": 7168, "table": 163840 * 7168, "without_experts": 1, "published": 1.03e12,
    },
    "qwen3-235b-a22b": {
        "dense": 4096 * (64 + 4 + 4) * 128 + 64 * 128 * 4096 + 4096 * 128,
        "experts": 128 * 3 * 4096 * 1536, "chosen": 8 * (4096, 3 * 1536), "kept": (2 * 64 + 2 * 4 + 2 * 64) * 128,
        "hidden": 4096, "table": 151936 * 4096, "without_experts": 0, "published": 235e9,
    },
}  # fmt: skip
CASES = [("deepseek-v3", "128x8", "h200"), ("kimi-k2-instruct", "64x8", "h200"), ("qwen3-235b-a22b", "32x8", "h100")]


def task(model, cluster, gpu):
    batch = BatchSpec(512, 8, max_tokens_per_mb=16384)
    return Task(allocation.load_model(model), Cluster.parse(cluster), GPUS[gpu], batch)


def gpus(asked):
    """Splits of the GPUs in which the servers get a third, and more."""
    total = asked.cluster.n_gpus
    return [
        n for n in sizes_of_trainer(asked.cluster) if best_servers(asked, total - n, SHARE) and n <= total * 2 // 3
    ][::-1]


def trainer_by_hand(hand, sizes, layers, stage):
    """Bytes of a rank in any stage but the last, with full recomputation; the first stage has the embedding."""
    plain = hand["without_experts"] if stage == 0 else 0
    dense, experts = layers * hand["dense"] / sizes.tp, (layers - plain) * hand["experts"] / sizes.ep
    dense += (plain * 3 * 7168 * 18432 + (hand["table"] if stage == 0 else 0)) / sizes.tp
    weights, gradients = 2 * (dense + experts), 4 * (dense + experts)
    optimizer = 12 * (dense / (sizes.dp * sizes.cp) + experts / sizes.edp)  # main weights 4, two moments of 4
    tokens = 16384 / sizes.cp / sizes.tp
    inputs = layers * hand["hidden"] * 2 * tokens * (sizes.pp - stage)  # of every layer, of each micro-batch under way
    one_layer = (sum(hand["chosen"]) + hand["kept"]) * 2 * tokens
    its_gradients = sum(hand["chosen"]) * 2 * tokens
    libraries = 1.2e9
    return (weights + gradients + optimizer + inputs + one_layer + its_gradients) * 1.03 + libraries


@pytest.mark.parametrize(("model", "cluster", "gpu"), CASES)
def test_the_largest_models_have_plans_whose_memory_is_that_of_a_count_by_hand(model, cluster, gpu):
    asked, hand = task(model, cluster, gpu), BY_HAND[model]
    every = (layouts_of(asked, n, best_servers(asked, asked.cluster.n_gpus - n, SHARE), None) for n in gpus(asked))
    plain = (one for choices in every for one in choices if one.trainer.megatron == with_ends(FULL, one.trainer.ends))
    choices = list(islice(plain, 8))
    assert len(choices) >= 2  # others recompute less
    for choice in choices:
        sizes, megatron = choice.trainer.sizes, choice.trainer.megatron
        of_trainer = footprint_of("actor", "megatron", sizes, asked.work(megatron))
        layers = len(stages(asked.model, sizes, megatron)[of_trainer.stage])
        assert of_trainer.stage < sizes.pp - 1 and megatron.recompute_granularity == "full"
        assert choice.peak == of_trainer.peak.bytes < asked.gpu.memory
        assert choice.peak == pytest.approx(trainer_by_hand(hand, sizes, layers, of_trainer.stage), rel=0.1)

        servers = ParallelSizes(tp=choice.servers.tp, dp=choice.servers.dp)
        of_server = footprint_of("rollout", "sglang", servers, asked.work(megatron)).phase("rollout")
        weights = next(item.bytes for item in of_server.items if item.name == "weights")
        assert weights == pytest.approx(2 * hand["published"] / servers.tp, rel=0.1)
        assert of_server.bytes < asked.gpu.memory

        work = asked.work(megatron)
        known = {"model": asked.model, "batch": work.batch, "memory": work.memory, "megatron": megatron}
        assert allocation.compile(choice.allocation, cluster=asked.cluster, **known).n_gpus == asked.cluster.n_gpus


@given(st.integers(1, 200), st.integers(1, 24), st.sampled_from([1, 1, 2, 3]))
def test_every_split_is_one_that_megatron_takes_and_no_stage_is_longer_than_needed(layers, p, v):
    ends = uneven_ends(layers, p, v)
    if layers % v or layers < p * v:
        assert ends is None
    elif layers % (p * v) == 0:
        assert ends == EVEN
    if ends is None:
        return
    settings = MegatronSettings(num_layers_in_first_pipeline_stage=ends[0], num_layers_in_last_pipeline_stage=ends[1])
    model = replace(allocation.load_model("qwen3-0.6b"), layers=layers)
    if p > 1 or v == 1:
        assert allocation.check(f"megatron:p{p}v{v}", model=model, megatron=settings).ok
    counts = [len(stage) for stage in stages(model, ParallelSizes(pp=p, vpp=v), settings)]
    assert sum(counts) == layers and len({*counts[1:-1]}) <= 1
    assert counts[-1] <= counts[0] or ends[0] is None
    shortest = [
        max(first, last, middle)
        for middle in range(1, layers // v)
        for first in range(1, layers // v)
        if (last := layers // v - first - (p - 2) * middle) > 0
    ]
    assert p == 1 or max(counts) <= max(-(-layers // v // p), min(shortest, default=layers)) * v


few = st.sampled_from([None, None, 0, 1, 2, 5, 8])


@given(st.integers(2, 200), st.integers(1, 24), st.sampled_from([1, 1, 2]), few, few)
def test_the_help_for_layers_that_do_not_divide_is_followed(layers, p, v, first, last):
    model = replace(allocation.load_model("qwen3-0.6b"), layers=layers)
    given = MegatronSettings(num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last)
    text = f"megatron:p{p}v{v if p > 1 else 1}"
    for finding in allocation.check(text, model=model, megatron=given).findings:
        if finding.code != "ALLOC-LAYERS":
            continue
        if finding.help is None:
            assert uneven_ends(layers, p, v) is None
            continue
        if finding.help.startswith("leave"):
            settings = MegatronSettings()
        else:
            words = finding.help.removeprefix("write ").partition(":")[0].split()
            settings = replace(given, **{name: int(n) for name, _, n in (word.partition("=") for word in words)})
        assert allocation.check(text, model=model, megatron=settings).ok


def test_the_published_split_of_94_layers_on_12_stages():
    assert uneven_ends(94, 12) == (7, 7) and split_words(94, 12, (7, 7)) == "7 + 10·8 + 7"
    asked = CliRunner().invoke(app, ["check", "megatron:p12", "-m", "qwen3-235b-a22b"])
    assert asked.exit_code == 1 and "write --first-stage-layers 7 --last-stage-layers 7: 7 + 10·8 + 7" in asked.stdout
    ends = ["--first-stage-layers", "7", "--last-stage-layers", "7"]
    assert CliRunner().invoke(app, ["check", "megatron:p12", "-m", "qwen3-235b-a22b", *ends]).exit_code == 0
    words = ["plan", "-m", "qwen3-235b-a22b", "-c", "32x8", "-b", "512x8", "--json", *ends]
    planned = json.loads(CliRunner().invoke(app, words).stdout)
    assert {one["num_layers_in_last_pipeline_stage"] for one in planned["layouts"]} == {7}
    stages = {int(re.search(r"p(\d+)", one["allocation"])[1]) for one in planned["layouts"]}
    assert stages and all(80 % (n - 2) == 0 for n in stages)
    memory = ["memory", "megatron:(attn:d4p12c2|ffn:e8)", "-m", "qwen3-235b-a22b", "--recompute", "full", "--json"]
    plain, uneven = (json.loads(CliRunner().invoke(app, [*memory, *more]).stdout or "{}") for more in ([], ends))
    assert not plain and uneven["engines"]["actor"]["stage"] == 1


def test_the_shortfall_names_the_side_and_the_bytes():
    small = CliRunner().invoke(app, ["plan", "-m", "deepseek-v3", "-c", "4x8", "-g", "h100"])
    assert small.exit_code == 1 and "the trainer alone needs at least" in small.stderr
    assert "the servers alone" not in small.stderr and "GiB more than it has" in small.stderr
    asked = task("deepseek-v3", "4x8", "h100")
    assert least_trainer(asked)[0] > asked.gpu.memory >= least_servers(asked)[0]
    both = CliRunner().invoke(app, ["plan", "-m", "qwen3-32b", "-c", "1x8", "-g", "73GiB"])
    asked = replace(task("qwen3-32b", "1x8", "h100"), gpu=find_gpu("73GiB"))
    trainer, servers = fewest_gpus(asked)
    assert f"the trainer needs at least {trainer} GPUs and the servers {servers}; the cluster has 8" in both.stderr
    assert trainer + servers > 8
