"""One console line when most groups are dropped or the trainer mostly waits, with the key to change."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.core.config.keys import annotation_of
from areal_like.core.loop import loop
from areal_like.core.loop.gpu_sharing import RESIDENT
from areal_like.metrics import waiting
from areal_like.metrics.console import View
from areal_like.metrics.record import Record
from areal_like.metrics.waiting import REPEAT_S, WaitingNotes, explain

WAITS = {"seconds/step": 100.0, "seconds/wait_for_rollouts": 80.0, "idle/servers": 0.1}


@pytest.mark.parametrize(
    ("scalars", "agents", "keys"),
    [
        ({"rollout/dropped_groups": 259.0}, False, ["train_dataset.curriculum", "gconfig.n_samples"]),
        ({"reward/queue_seconds_mean": 40.0}, False, ["reward.workers"]),
        ({"rollout/queue_seconds_mean": 40.0}, False, ["rollout.backend"]),
        ({"idle/servers": 0.9}, True, ["rollout.max_concurrent_rollouts", "rollout.max_head_offpolicyness"]),
        ({"idle/servers": 0.9}, False, ["rollout.max_head_offpolicyness", "train_dataset.batch_size"]),
        ({"rollout/longest_seconds": 75.0}, False, ["gconfig.max_new_tokens", "rollout.oversampling"]),
        ({"rollout/longest_seconds": 75.0, "idle/servers": 0.9}, True, ["rollout.oversampling"]),
        ({}, False, ["rollout.backend"]),
    ],
)
def test_the_cause_names_existing_keys(scalars: dict[str, float], agents: bool, keys: list[str]) -> None:
    said = explain(WAITS | scalars, 4, agents=agents)
    assert said is not None
    for key in keys:
        assert key in said and annotation_of(key) is not None


@pytest.mark.parametrize(
    ("captured", "key"), [(0, "disable_cuda_graph"), (512, "max_running_requests=512"), (513, None)]
)
def test_passes_without_graphs_are_a_cause(captured: int, key: str | None) -> None:
    said = explain(WAITS | {"rollout/running": 512.5}, 4, agents=False, captured=captured)
    assert said is not None and ("CUDA graphs" in said) == bool(key) and (key or "") in said


@pytest.mark.parametrize("scalars", [{"seconds/wait_for_rollouts": 40.0}, {"seconds/wait_for_rollouts": 0.0}])
def test_a_busy_trainer_is_not_mentioned(scalars: dict[str, float]) -> None:
    assert explain(WAITS | scalars | {"rollout/dropped_groups": 4.0}, 4, agents=False) is None


def test_a_line_is_repeated_after_ten_minutes_at_the_earliest() -> None:
    said, time = list[str](), [0.0]
    notes = WaitingNotes(4, False, said.append, clock=lambda: time[0])
    for step, present in enumerate((0.0, 1.0, 2.0, REPEAT_S, 1.0 + REPEAT_S), 1):
        time[0] = present
        notes.log(step, WAITS)
        notes.log(step, {"reward/held_out": 0.5})
    assert [line.partition(":")[0] for line in said] == ["step 2", "step 5"]


def wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, looks: int, drops: int = 0, agents: bool = True
) -> list[str]:
    """Return the lines of one wait of the loop with a look each minute, and of the step that it ends."""
    said, time = list[str](), [0.0]
    notes = WaitingNotes(4, agents, said.append, clock=lambda: time[0])
    monkeypatch.setattr(waiting, "LOOK_S", 0.0)
    collector = SimpleNamespace(dropped=7)

    async def next_batch() -> list[Any]:
        for _ in range(looks):
            time[0] += 60.0
            collector.dropped += drops
            await asyncio.sleep(0.001)
        return []

    collector.next_batch = next_batch
    parts: Any = SimpleNamespace(
        collector=collector,
        policies={"": SimpleNamespace(rewards=SimpleNamespace(queue_seconds_mean=lambda: 0.0))},
        load=lambda: {"idle/servers": 1.0, "rollout/longest_seconds": 1.0},
        stop=SimpleNamespace(asked=asyncio.Event()),
        sharing=RESIDENT,
        recovery=None,
        hooks=(),
    )
    record = Record(tmp_path, "t", View(False), waiting=notes)

    async def step() -> None:
        with record.recording():
            await loop._next_step(parts, 0, record, None)
            notes.log(1, WAITS)
            notes.log(2, WAITS)

    asyncio.run(step())
    record.close()
    return said


def test_a_wait_is_reported_while_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = wait(tmp_path, monkeypatch, looks=15)
    assert len(said) == 1 and "10 min so far" in said[0] and "rollout.max_concurrent_rollouts" in said[0]


def test_a_long_wait_is_reported_every_ten_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(wait(tmp_path, monkeypatch, looks=35)) == 3


def test_drops_in_a_wait_are_reported_before_ten_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = wait(tmp_path, monkeypatch, looks=8, drops=1)
    assert len(said) == 1 and "5 of 9 groups" in said[0] and "gconfig.n_samples" in said[0]


def test_a_short_wait_is_not_reported_before_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [line.partition(":")[0] for line in wait(tmp_path, monkeypatch, looks=9)] == ["step 2"]
