"""One console line when most groups are dropped or the trainer mostly waits, with the key to change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.capabilities.operations import hook
from areal_like.capabilities.operations.alerts import REPEAT_S, Console, Trends
from areal_like.capabilities.operations.hook import Operations
from areal_like.capabilities.operations.memory import ProcessMemory
from areal_like.capabilities.operations.waiting import explain
from areal_like.core.config.keys import annotation_of
from areal_like.core.loop import loop
from areal_like.core.loop.loop import RESIDENT
from areal_like.metrics.console import View
from areal_like.metrics.record import Record

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
        assert key in said.text and annotation_of(key) is not None


def test_the_wait_for_requests_in_an_update_counts_as_waiting() -> None:
    drained = {"seconds/step": 100.0, "seconds/wait_for_rollouts": 10.0, "seconds/weight_update": 60.0}
    assert (
        explain(drained, 4, agents=False, drains=True) is None
    )  # responses are short: it would wait as long for others
    drained["rollout/longest_seconds"] = 70.0
    said = explain(drained, 4, agents=False, drains=True)
    assert said is not None and "weight_update.requests=in_place" in said.text
    assert explain(drained, 4, agents=False) is None
    other = explain(drained | WAITS | {"seconds/weight_update": 5.0}, 4, agents=False, drains=True)
    assert other is not None and "weight_update" not in other.text


@pytest.mark.parametrize(
    ("captured", "key"), [(0, "disable_cuda_graph"), (512, "max_running_requests=512"), (513, None)]
)
def test_passes_without_graphs_are_a_cause(captured: int, key: str | None) -> None:
    said = explain(WAITS | {"rollout/running": 512.5}, 4, agents=False, captured=captured)
    assert said is not None and ("CUDA graphs" in said.text) == bool(key) and (key or "") in said.text


@pytest.mark.parametrize("scalars", [{"seconds/wait_for_rollouts": 40.0}, {"seconds/wait_for_rollouts": 0.0}])
def test_a_busy_trainer_is_not_mentioned(scalars: dict[str, float]) -> None:
    assert explain(WAITS | scalars | {"rollout/dropped_groups": 4.0}, 4, agents=False) is None


def operations(say: Callable[[str], None], clock: Callable[[], float], *, agents: bool = False) -> Operations:
    return Operations(Console(say, clock), Trends(1.0), ProcessMemory(list, clock), None, 4, agents)


def test_a_line_is_repeated_after_ten_minutes_at_the_earliest() -> None:
    said, time = list[str](), [0.0]
    hook = operations(said.append, lambda: time[0])
    for step, present in enumerate((0.0, 1.0, 2.0, 3.0, REPEAT_S, 3.0 + REPEAT_S), 1):
        time[0] = present
        hook.derive_metrics(step, WAITS)
    assert [line.partition(":")[0] for line in said] == ["step 4", "step 6"]


def wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, looks: int, drops: int = 0, agents: bool = True
) -> list[str]:
    """Return the lines of one wait of the loop with a look each minute, and of the step that it ends."""
    said, time = list[str](), [0.0]
    operating = operations(said.append, lambda: time[0], agents=agents)
    monkeypatch.setattr(hook, "LOOK_S", 0.0)
    collector = SimpleNamespace(dropped=7, oldest_s=1.0)

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
        hooks=(operating,),
    )
    record = Record(tmp_path, "t", View(False))

    async def step() -> None:
        with record.recording():
            await loop._next_step(parts, 0, record, None)
            operating.derive_metrics(1, WAITS)
            operating.derive_metrics(2, WAITS)

    asyncio.run(step())
    record.close()
    return said


def test_a_group_that_does_not_end_is_reported_in_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    said, time = list[str](), [0.0]
    monkeypatch.setattr(hook, "LOOK_S", 0.0)
    present = {"rollout/dropped_groups": 0.0, "idle/servers": 0.0, "rollout/oldest_group_seconds": 700.0}

    async def step() -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(operations(said.append, lambda: time[0]).while_waiting(3, lambda: present), 0.05)

    asyncio.run(step())
    assert len(said) == 1 and said[0].startswith("step 3:") and "#stuck-groups" in said[0]


def test_a_wait_is_reported_while_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = wait(tmp_path, monkeypatch, looks=15)
    assert len(said) == 1 and "10 min so far" in said[0] and "rollout.max_concurrent_rollouts" in said[0]


def test_a_long_wait_is_reported_every_ten_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(wait(tmp_path, monkeypatch, looks=35)) == 3


def test_drops_in_a_wait_are_reported_before_ten_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = wait(tmp_path, monkeypatch, looks=8, drops=1)
    assert len(said) == 1 and "5 of 9 groups" in said[0] and "gconfig.n_samples" in said[0]


def test_a_short_wait_is_not_reported_before_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wait(tmp_path, monkeypatch, looks=9) == []
