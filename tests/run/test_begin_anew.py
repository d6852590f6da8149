"""A run starts at step 0 again only where it was asked to, and then nothing of the old one is deleted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from areal_like.core.checkpoint.journal import RunState, Step
from areal_like.core.config.load import load
from areal_like.core.errors import CheckpointError
from areal_like.core.types import Prompt
from areal_like.metrics.console import View
from areal_like.metrics.names import METRICS_FILE
from areal_like.metrics.record import Record
from areal_like.metrics.sinks.scalars import Scalars
from areal_like.preflight.machine import FAILED_FILE, _directory
from areal_like.preflight.resume import check_resume
from areal_like.run.directory import run_directory

CONFIG = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_cpu.yaml"
PROMPTS = [Prompt(row, [row]) for row in range(7)]


def config_of(folder: Path, *overrides: str) -> Any:
    fixed = ("trial_name=t", f"cluster.fileroot={folder}", "recover.mode=auto", "stats_logger.console=false")
    return load(CONFIG, [*fixed, *overrides]).config


def enter(folder: Path, *overrides: str, steps: int = 0, checkpoint: bool = False, fails: bool = False) -> int:
    """Enter the run's directory, make steps there, and return the one that it went on from."""
    config = config_of(folder, *overrides)
    job = cast(Any, SimpleNamespace(config=config, train_prompts=PROMPTS))

    async def attempt() -> int:
        view = View(enabled=False)
        async with run_directory(job, view, lambda _: Record(config.run_dir, "t", view)) as opened:
            version = opened.state.version
            for step in range(version + 1, version + 1 + steps):
                opened.journal.append(Step(step, [step], [step]))
            if checkpoint:
                record = {"rewards": {}, "held_out": {}}
                state = RunState(version + steps, version + steps + 1, record=record)
                opened.store.commit(opened.store.begin(state.version), state, {})
            if fails:
                raise RuntimeError
            return version

    return asyncio.run(attempt())


@pytest.mark.parametrize("step", [True, False])
def test_only_a_run_that_failed_before_its_first_step_leaves_its_directory_to_the_same_command(
    tmp_path: Path, step: bool
) -> None:
    def enter_without_recovery(*, fails: bool) -> None:
        config = config_of(tmp_path, "recover.mode=off")
        job, view = cast(Any, SimpleNamespace(config=config, train_prompts=PROMPTS)), View(enabled=False)

        def record(_: int | None) -> Record:
            return Record(config.run_dir, "t", view, [Scalars(config.run_dir / METRICS_FILE)])

        async def attempt() -> None:
            async with run_directory(job, view, record) as opened:
                if step:
                    opened.record.step(1, {}, 0)
                    opened.record.close()
                if fails:
                    raise RuntimeError

        asyncio.run(attempt())

    with pytest.raises(RuntimeError):
        enter_without_recovery(fails=True)
    refused = [each.code for each in _directory(config_of(tmp_path, "recover.mode=off"))]
    assert refused == (["RUN-DIRECTORY"] if step else [])
    if not step:
        enter_without_recovery(fails=False)
        assert not (run_of(tmp_path) / FAILED_FILE).exists()
        (taken,) = _directory(config_of(tmp_path, "recover.mode=off"))
        assert taken.code == "RUN-DIRECTORY"


def run_of(folder: Path) -> Path:
    return folder / "gsm8k-grpo-cpu/t"


def found(folder: Path, *overrides: str) -> list[str]:
    return [f"{each.source.key}: {each.message}" for each in check_resume(config_of(folder, *overrides), PROMPTS, None)]


def test_a_journal_without_a_checkpoint_is_given_up_only_when_asked(tmp_path: Path) -> None:
    enter(tmp_path, steps=3)
    journal = run_of(tmp_path) / "recover/journal.jsonl"
    before = journal.read_bytes()
    with pytest.raises(
        CheckpointError, match=r"has 3 steps in its journal, but no complete checkpoint.*recover\.restart=true"
    ):
        enter(tmp_path)
    assert journal.read_bytes() == before
    assert found(tmp_path) == [
        f"recover.restart: the run in {run_of(tmp_path)} has 3 steps in its journal, but no complete checkpoint"
    ]
    assert found(tmp_path, "recover.restart=true") == []
    assert enter(tmp_path, "recover.restart=true", steps=1, checkpoint=True) == 0
    (aside,) = journal.parent.glob("unused-*-journal.jsonl")
    assert aside.read_bytes() == before


def test_incomplete_checkpoints_are_put_aside_only_when_asked(tmp_path: Path) -> None:
    enter(tmp_path, steps=2, checkpoint=True)
    recover = run_of(tmp_path) / "recover"
    (recover / "step-2/manifest.json").unlink()
    with pytest.raises(CheckpointError, match="2 steps in its journal and 1 incomplete checkpoints"):
        enter(tmp_path)
    assert (recover / "step-2/state.json").exists()
    assert enter(tmp_path, "recover.restart=true") == 0
    assert (recover / "unused-step-2/state.json").exists()


def test_a_whole_checkpoint_is_never_given_up_for_a_restart(tmp_path: Path) -> None:
    enter(tmp_path, steps=2, checkpoint=True)
    assert enter(tmp_path, "recover.restart=true", steps=1) == 2


def test_a_run_without_a_step_starts_again_by_itself(tmp_path: Path) -> None:
    enter(tmp_path)
    assert found(tmp_path) == []
    assert enter(tmp_path) == 0


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (0, "no step was completed; the same command with trial_name=t starts over"),
        (1, "no checkpoint is complete; the same command with trial_name=t and recover.restart=true starts over"),
    ],
)
def test_the_note_of_a_failure_names_the_command_that_works(tmp_path: Path, steps: int, said: str) -> None:
    with pytest.raises(RuntimeError) as raised:
        enter(tmp_path, steps=steps, fails=True)
    assert raised.value.__notes__ == [said]
    assert enter(tmp_path, *(["recover.restart=true"] if "restart" in said else [])) == 0
