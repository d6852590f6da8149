"""What each server of a run is told."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from allocation import ParallelSizes
from areal_like.backends.sglang.decode_graphs import graph_sizes
from areal_like.backends.sglang.options import server_arguments
from areal_like.core.config.load import load

CONFIG = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_cpu.yaml"


def random_seed(run_seed: int, server: int) -> int:
    config = load(CONFIG, [f"seed={run_seed}"]).config
    arguments = server_arguments(config, Path("model"), ParallelSizes(), "cpu", server)
    return int(arguments[arguments.index("--random-seed") + 1])


def test_servers_have_the_trainers_data_type_and_output_head():
    config = load(CONFIG, ["actor.dtype=float16", "actor.fp32_head=true"]).config
    arguments = server_arguments(config, Path("model"), ParallelSizes(), "cpu", 0)
    assert arguments[arguments.index("--dtype") + 1] == "float16" and "--enable-fp32-lm-head" in arguments
    plain = server_arguments(load(CONFIG, []).config, Path("model"), ParallelSizes(), "cpu", 0)
    assert plain[plain.index("--dtype") + 1] == "float32" and "--enable-fp32-lm-head" not in plain


def test_no_two_servers_draw_the_same_numbers():
    seeds = {random_seed(run, server) for run in (1, 2) for server in range(4)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**32 for seed in seeds)  # what SGLang takes
    assert random_seed(1, 3) == random_seed(1, 3)


@pytest.mark.parametrize(
    ("keys", "servers", "captured"),
    [
        ([], 1, 96),
        ([], 2, 48),
        (["rollout.max_head_offpolicyness=0"], 1, 32),
        (["gconfig.n_samples=800"], 1, 1536),
        (["rollout.max_concurrent_rollouts=40"], 1, 40),
        (["sglang.max_running_requests=24"], 1, 24),
    ],
)
def test_cuda_graphs_hold_what_a_server_runs_at_once(keys, servers, captured):
    assert most_captured(["valid_dataset=null", *keys], servers) == captured


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        (["sglang.context_length=1024"], 8),
        (["sglang.context_length=4096"], 16),
        (["sglang.context_length=32768"], 32),
        (["sglang.context_length=32768", "sglang.extra_args.triton_attention_num_kv_splits=5"], 5),
    ],
)
def test_long_sequences_are_attended_to_in_more_parts(keys, parts):
    assert last_value(keys, 1, "--triton-attention-num-kv-splits") == parts


def test_cuda_graphs_hold_an_evaluation():
    assert most_captured([], 1) == 256


def most_captured(keys: list[str], servers: int) -> int:
    keys = ["train_dataset.batch_size=4", "rollout.max_head_offpolicyness=2", "gconfig.n_samples=8", *keys]
    return captured_sizes(gpu_arguments(keys, servers))[-1]


def captured_sizes(arguments: Sequence[str]) -> list[int]:
    """The batch sizes after the option."""
    values = arguments[arguments.index("--cuda-graph-bs-decode") + 1 :]
    return [int(value) for value in itertools.takewhile(str.isdigit, values)]


def gpu_arguments(keys: list[str], servers: int = 1, model: Path = Path("model")) -> Sequence[str]:
    """The arguments of a server on a GPU."""
    return server_arguments(load(CONFIG, keys).config, model, ParallelSizes(dp=servers), "cuda")


def test_sizes_of_graphs_are_close_and_few():
    for most in range(1, 2000):
        sizes = graph_sizes(most)
        assert sizes[-1] == most and sizes == sorted(set(sizes)) and len(sizes) < 35
        assert all(after <= 2 * before and (before < 16 or after <= 1.51 * before) for before, after in pairwise(sizes))
        assert all(after <= 1.26 * before for before, after in pairwise(sizes) if before >= 64)


def test_a_large_vocabulary_limits_the_graphs(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 2**18}}))
    sizes = captured_sizes(gpu_arguments(["gconfig.n_samples=800"], model=tmp_path))
    assert sizes[-1] * 2**18 * 4 == 512 << 20


@pytest.mark.parametrize(
    "option", ["cuda_graph_max_bs_decode=7", "cuda-graph-max-bs-decode=7", "cuda_graph_bs_decode=7"]
)
def test_a_users_sizes_of_graphs_replace_the_runs(option):
    arguments = gpu_arguments([f"sglang.extra_args.{option}"])
    name = "--" + option.partition("=")[0].replace("_", "-")
    assert [word for word in arguments if word.startswith("--cuda-graph")] == [name]


def last_value(keys: list[str], servers: int, flag: str) -> int:
    """The value that SGLang uses: the last of several."""
    arguments = gpu_arguments(keys, servers)
    places = [at for at, argument in enumerate(arguments) if argument == flag]
    return int(arguments[places[-1] + 1])
