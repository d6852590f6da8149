"""A command without `trial_name` resumes the run that the same command left unfinished."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any, cast

import pytest
from running import CONFIG

from areal_like.core.checkpoint.journal import RunState
from areal_like.core.config.load import load
from areal_like.core.errors import ClusterError
from areal_like.job import Job
from areal_like.metrics.console import View
from areal_like.metrics.names import SUMMARY_FILE
from areal_like.metrics.record import Record
from areal_like.metrics.sinks.tensorboard import TensorBoard
from areal_like.preflight import preflight
from areal_like.run.directory import run_directory

SETTINGS = (
    *("total_train_steps=5", "recover.mode=auto", "stats_logger.console=false"),
    *("train_dataset.arithmetic.size=256", "valid_dataset.arithmetic.size=64"),
)


def prepare(folder: Path, *overrides: str) -> Job:
    return cast(Job, preflight(load(CONFIG, [*SETTINGS, f"cluster.fileroot={folder}", *overrides])).job)


def leave(job: Job, version: int | None, ending: type[BaseException] | None = None) -> None:
    """Begin a run, save a checkpoint after `version` steps, and end it."""

    async def begin() -> None:
        view, path = View(enabled=False), job.config.run_dir

        def record(_: int | None) -> Record:
            return Record(path, "t", view, [TensorBoard(path / "tensorboard")])

        async with run_directory(job, view, record) as opened:
            store = cast(Any, opened.store)
            opened.record.step(1, {"reward": 0.5, "tokens": 1.0}, 1)
            opened.record.close()
            if version:
                state = RunState(version, started=version * 64, record={"rewards": {}, "held_out": {}})
                store.commit(store.begin(version), state, {})
            if ending:
                raise ending

    asyncio.run(begin())


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    job = prepare(tmp_path, "trial_name=earlier")
    with pytest.raises(ClusterError):
        leave(job, 3, ClusterError)
    return job.config.run_dir


def test_the_same_command_resumes(unfinished: Path, tmp_path: Path) -> None:
    assert prepare(tmp_path).config.run_dir == unfinished


@pytest.mark.parametrize("change", ["seed=2", "total_train_steps=6", "trial_name=other", "recover.mode=fault"])
def test_another_command_starts_another_run(unfinished: Path, tmp_path: Path, change: str) -> None:
    assert prepare(tmp_path, change).config.run_dir != unfinished


def test_a_finished_run_is_not_resumed(unfinished: Path, tmp_path: Path) -> None:
    (unfinished / SUMMARY_FILE).write_text("{}")
    assert prepare(tmp_path).config.run_dir != unfinished


def test_a_run_without_a_checkpoint_is_not_resumed(tmp_path: Path) -> None:
    job = prepare(tmp_path, "trial_name=earlier")
    leave(job, None)
    assert prepare(tmp_path).config.run_dir != job.config.run_dir


def test_only_the_owner_can_use_the_files_of_a_run(unfinished: Path) -> None:
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [unfinished, *unfinished.rglob("*")]}
    assert len(modes) > 8
    assert not {str(path): oct(mode) for path, mode in modes.items() if mode & 0o077}
