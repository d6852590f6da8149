"""A write that hangs is reported, and ends the run instead of keeping it."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from areal_like.core.checkpoint.journal import Journal, RunState, Step
from areal_like.core.checkpoint.recovery import Recovery
from areal_like.core.checkpoint.store import JOURNAL, Store, newest
from areal_like.core.config.schema import RecoverConfig
from areal_like.core.errors import CheckpointError
from areal_like.core.trainer.remote import Trainer


class Saving:
    """A trainer whose share is on disk when `written` is set."""

    def __init__(self) -> None:
        self.written = asyncio.Event()

    async def save(self, path: Path) -> None:
        path.mkdir()

    async def finish_save(self, timeout_s: float) -> None:
        await self.written.wait()


def recovery_of(folder: Path, warnings: list[str], trainer: object, **keys: Any) -> Recovery:
    folder.mkdir()
    journal = Journal(folder / JOURNAL, "data")
    return Recovery(
        config=RecoverConfig(mode="auto", **keys),
        store=Store(folder, journal.run, 3),
        journal=journal,
        trained={"actor": cast(Any, trainer)},
        version=0,
        warn=warnings.append,
    )


async def keep(recovery: Recovery, version: int, tasks: asyncio.TaskGroup, now: bool = False) -> None:
    await recovery.keep(RunState(version), tasks, now=now, evaluating=None, record=lambda _: {})


def test_each_checkpoint_that_is_skipped_is_reported_once(tmp_path: Path) -> None:
    warnings: list[str] = []

    async def train() -> None:
        trainer = Saving()
        recovery = recovery_of(tmp_path / "recover", warnings, trainer, freq_steps=2, freq_secs=None)
        async with asyncio.TaskGroup() as tasks:
            for version in range(1, 9):
                await keep(recovery, version, tasks)
            trainer.written.set()
            await keep(recovery, 9, tasks, now=True)

    asyncio.run(train())
    assert [warning.partition(" is still")[0] for warning in warnings] == [
        f"step {version} has no checkpoint: the one of step 2" for version in (4, 6, 8)
    ]
    assert newest(tmp_path / "recover")[0].state.version == 9


@pytest.mark.parametrize("written", [False, True])
def test_ctrl_c_after_a_step_that_has_its_checkpoint_writes_no_other_one(tmp_path: Path, written: bool) -> None:
    async def train() -> None:
        trainer = Saving()
        recovery = recovery_of(tmp_path / "recover", [], trainer, freq_steps=2, freq_secs=None)
        async with asyncio.TaskGroup() as tasks:
            await keep(recovery, 2, tasks)
            if written:
                trainer.written.set()
                await recovery.wait_for_write()
            asked = tasks.create_task(keep(recovery, 2, tasks, now=True))
            await asyncio.sleep(0)
            trainer.written.set()
            await asked
            await recovery.wait_for_write()

    asyncio.run(train())
    assert sorted(path.name for path in (tmp_path / "recover").glob("*step*")) == ["step-2"]


@pytest.mark.parametrize("what", ["the checkpoint of step 1", "the journal's line of step 1"])
def test_a_disk_that_hangs_ends_the_run_with_path_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    hangs, never = threading.Event(), threading.Event()

    def hang(descriptor: int) -> None:
        hangs.set()
        never.wait()

    async def train() -> None:
        trainer = Saving()
        trainer.written.set()
        recovery = recovery_of(tmp_path / "recover", [], trainer, timeout_s=0.2)
        monkeypatch.setattr(os, "fsync", hang)
        if "journal" in what:
            await recovery.note(Step(1, [0], [0]))
        async with asyncio.TaskGroup() as tasks:
            await keep(recovery, 1, tasks, now=True)

    try:
        with pytest.raises((CheckpointError, ExceptionGroup)) as raised:
            asyncio.run(train())  # which would wait for a thread of its own pool
    finally:
        never.set()
    assert hangs.is_set()
    error = raised.value.exceptions[0] if isinstance(raised.value, ExceptionGroup) else raised.value
    assert isinstance(error, CheckpointError)
    assert str(error).startswith(f"{what} was not written to {tmp_path}/recover within 0.2 s (recover.timeout_s)")


def test_a_rank_that_does_not_write_its_share_is_named(tmp_path: Path) -> None:
    class Ranks:
        role = "actor"

        async def call_all(self, _: str, method: str, *arguments: Any, phase: str) -> list[Any]:
            return [True, False, True, False] if method == "is_saved" else []

    async def save() -> None:
        trainer = Trainer(cast(Any, Ranks()))
        await trainer.save(tmp_path / "actor")
        await trainer.finish_save(0.0)

    with pytest.raises(CheckpointError, match=r"actor rank 1, 3 did not end within the time of recover\.timeout_s"):
        asyncio.run(save())
