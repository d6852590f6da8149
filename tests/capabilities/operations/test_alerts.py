"""Each fault of a run is reported once in ten minutes with its cause, and a healthy run reports nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from areal_like.capabilities.operations.advice import GpuSplit
from areal_like.capabilities.operations.alerts import LEAST, STUCK_S, Console, Trends
from areal_like.capabilities.operations.hook import Operations, reward_length_correlation
from areal_like.capabilities.operations.memory import ProcessMemory
from areal_like.config.keys import annotation_of
from areal_like.types import FinishReason, Trajectory

ROOT = Path(__file__).parents[3]
HEALTHY = {
    "seconds/step": 10.0,
    "seconds/wait_for_rollouts": 1.0,
    "idle/servers": 0.05,
    "idle/trainer": 0.05,
    "reward/mean": 0.4,
    "train/entropy": 1.0,
    "rollout/response_length": 100.0,
    "rollout/reward_length_correlation": 0.6,
    "rollout/logprob_diff_server_trainer": 0.01,
    "rollout/oldest_group_seconds": 20.0,
    "rollout/longest_seconds": 5.0,
}
SPLIT = GpuSplit(servers=4, trainer=4, server_unit=1, trainer_unit=1, staleness=2)
type Series = Callable[[int], Mapping[str, float]]


def play(series: Series, steps: int = 2 * LEAST, seconds: float = 1.0) -> list[str]:
    """Return the lines about a run with planted metrics."""
    said, time = list[str](), [0.0]

    def clock() -> float:
        return time[0]

    memory = ProcessMemory(list, clock)
    operations = Operations(Console(said.append, clock), Trends(0.1, SPLIT), memory, None, 4, False)
    for step in range(1, steps + 1):
        time[0] += seconds
        operations.derive_metrics(step, HEALTHY | series(step))
    return said


PLANTED: dict[str, Series] = {
    "entropy-collapse": lambda step: {"train/entropy": 0.9**step},
    "drift": lambda step: {"rollout/logprob_diff_server_trainer": 0.02 * step},
    "idle-servers": lambda step: {"idle/servers": 0.7},
    "idle-trainer": lambda step: {"seconds/wait_for_rollouts": 8.0, "idle/trainer": 0.2},
    "dropped-groups": lambda step: {"rollout/dropped_groups": 30.0},
    "reward-by-length": lambda step: {"reward/mean": 0.4 + 0.01 * step, "rollout/response_length": 100.0 + 5 * step},
    "stuck-groups": lambda step: {"rollout/oldest_group_seconds": STUCK_S + step},
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_fault_is_named_once_in_ten_minutes(kind: str) -> None:
    said = play(PLANTED[kind])
    assert len(said) == 1 and said[0].endswith(f"(docs/operations.md#{kind})"), said
    keys = re.findall(r"(?<![\w/])[a-z_]+\.[a-z_.]*[a-z](?=[\s,.)])", said[0].partition(": ")[2])
    for key in keys:
        assert key in ("workflows.log", "operations.md") or annotation_of(key) is not None, key
    assert f"## {kind.replace('-', ' ').capitalize()}\n" in (ROOT / "docs/operations.md").read_text()


def test_a_fault_that_lasts_is_named_every_ten_minutes() -> None:
    assert len(play(PLANTED["drift"], steps=100, seconds=30.0)) == 5


def test_a_healthy_run_reports_nothing() -> None:
    assert play(lambda step: {}) == []


@pytest.mark.parametrize(
    "series",
    [
        lambda step: {"train/entropy": 0.9**step, "reward/mean": 0.97},  # solved
        lambda step: {"train/entropy": 0.9 ** min(step, 20)},  # 0.12 of the first one
        lambda step: {"rollout/logprob_diff_server_trainer": 0.5 if step % 4 == 0 else 0.01},
        lambda step: {"reward/mean": 0.4 + 0.01 * step},
        lambda step: {"rollout/response_length": 100.0 + 5 * step},
        lambda step: PLANTED["reward-by-length"](step) | {"rollout/reward_length_correlation": 0.1},
        lambda step: {"rollout/oldest_group_seconds": STUCK_S + step, "seconds/step": 300.0},
    ],
)
def test_similar_series_without_a_fault_report_nothing(series: Series) -> None:
    assert play(series) == []


@pytest.mark.parametrize(("rewards", "named"), [((0.3, 0.3), True), ((0.3, 0.5), False)])
def test_a_reward_that_rises_in_evaluations_too_is_no_fault(rewards: tuple[float, float], named: bool) -> None:
    trends = Trends(0.1, evaluations=lambda: {10: rewards[0], 39: rewards[1]})
    for step in range(1, 2 * LEAST + 1):
        found = trends.look(step, HEALTHY | PLANTED["reward-by-length"](step))
    assert [alert.kind for alert in found] == (["reward-by-length"] if named else [])


def test_the_demo_reports_nothing() -> None:
    recorded = json.loads((ROOT / "benchmarks/results/demo_cpu.json").read_text())
    for run in recorded["runs"]:
        series = {name: dict(map(tuple, points)) for name, points in run["scalars"].items()}
        steps = sorted(series["seconds/step"])
        said: list[str] = []
        memory = ProcessMemory(list, lambda: 0.0)
        operations = Operations(Console(said.append, lambda: 0.0), Trends(1e-3), memory, None, 64, False)
        for step in steps:
            operations.derive_metrics(step, {name: points[step] for name, points in series.items() if step in points})
        assert said == [] and len(steps) > LEAST


def test_lengths_and_rewards_are_compared_within_groups() -> None:
    def one(group: int, length: int, reward: float | None) -> Trajectory:
        made = np.array([-1, *[3] * length], np.int32)
        return Trajectory(0, group, made, np.zeros(len(made), np.float32), made, FinishReason.STOP, reward)

    longer_is_better = [one(0, 1, 0.0), one(0, 9, 1.0), one(1, 50, 0.0), one(1, 60, 1.0), one(1, 5, None)]
    assert reward_length_correlation(longer_is_better) == pytest.approx(1.0, abs=0.02)
    groups_differ = [one(0, 5, 0.0), one(0, 9, 0.0), one(1, 50, 1.0), one(1, 60, 1.0)]
    assert reward_length_correlation(groups_differ) is None
    assert reward_length_correlation([]) is None
