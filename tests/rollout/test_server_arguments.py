"""What each server of a run is told."""

from __future__ import annotations

from pathlib import Path

from allocation import ParallelSizes
from areal_like.config.load import load
from areal_like.rollout.sglang.options import server_arguments

CONFIG = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_cpu.yaml"


def random_seed(run_seed: int, server: int) -> int:
    config = load(CONFIG, [f"seed={run_seed}"]).config
    arguments = server_arguments(config, Path("model"), ParallelSizes(), "cpu", server)
    return int(arguments[arguments.index("--random-seed") + 1])


def test_no_two_servers_draw_the_same_numbers():
    seeds = {random_seed(run, server) for run in (1, 2) for server in range(4)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**32 for seed in seeds)  # what SGLang takes
    assert random_seed(1, 3) == random_seed(1, 3)
