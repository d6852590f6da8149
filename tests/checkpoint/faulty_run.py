"""A run's record, journal and checkpoints with one failing system call after another; started with `faults.c` loaded.

`python faulty_run.py LIBRARY FOLDER STRIDE OFFSET [--every-error]`: the calls number OFFSET, OFFSET + STRIDE, ... fail
once each, with one of the errors or with each of them. Trainer, servers and rewards are left out. Every problem is a
line of output; the last line counts the cases.
"""

import asyncio
import ctypes
import errno
import json
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np

from areal_like.capabilities.report.run_page import RunPage
from areal_like.core.checkpoint.journal import Journal, RunState, Step, read_header
from areal_like.core.checkpoint.store import newest
from areal_like.core.config.load import load
from areal_like.core.errors import RunError, writing
from areal_like.core.types import FinishReason, Prompt, Trajectory
from areal_like.metrics.console import View
from areal_like.metrics.event_file import read_events
from areal_like.metrics.record import Record
from areal_like.metrics.sinks import make_sinks
from areal_like.run.directory import run_directory
from areal_like.runtime import owner

CONFIG = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_cpu.yaml"
ERRORS = (errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EINTR)
BEGUN, ALL = 2, 4  # steps before the fault, and in the end
PROMPTS = [Prompt(row, [row]) for row in range(3)]
PICTURE = ModuleType("areal_like.metrics.picture")


class Trainer:
    """Writes a file for weights."""

    async def save(self, path: Path) -> None:
        self._path = path

    async def finish_save(self, timeout_s: float) -> None:
        with writing(self._path):
            self._path.mkdir()
            (self._path / "weights").write_text("w")


class Stopped(Exception):
    """The run is stopped after BEGUN steps."""


def trajectory(step: int) -> Trajectory:
    tokens = np.array([65, 66], np.int32)
    made = np.array([-1, step], np.int32)
    return Trajectory(step, step, tokens, np.zeros(2, np.float32), made, FinishReason.STOP, 1.0)


async def attempt(config: Any, steps: int, stop: int | None = None) -> None:
    """The command: the run from where it stands."""
    job = cast(Any, SimpleNamespace(config=config, train_prompts=PROMPTS))
    view, path = View(enabled=False), config.run_dir

    def record(void_from: int | None) -> Record:
        sinks = make_sinks(config, path, void_from)
        return Record(
            path,
            "t",
            view,
            sinks,
            about={"config": "seed: 1"},
            listeners=[RunPage(path)],
            void_from=void_from,
            decode=str,
        )

    async with run_directory(job, view, record) as opened:
        kept = opened.record
        try:
            with kept.recording():
                async with asyncio.TaskGroup() as tasks:
                    recovery = opened.recovery(config, {"actor": cast(Any, Trainer())})
                    for done in range(opened.state.version + 1, steps + 1):
                        with kept.phase("training"):
                            await kept.samples(done, [trajectory(done)])
                        kept.held_out(done, {"valid": {"mean@1": 0.5}})
                        kept.step(done, {"reward": 1.0, "loss": 0.5}, 10 * done)
                        await recovery.note(Step(done, [done - 1], [done - 1]))
                        state = RunState(done, done)
                        await recovery.keep(state, tasks, now=True, evaluating=None, record=kept.state)
                        if done == stop:
                            await recovery._writing
                            raise Stopped
            kept.finish()
            kept.end("finished")
        finally:
            kept.close()


def ending(config: Any, steps: int, stop: int | None = None) -> BaseException | None:
    """How the command ended: None, or its first error."""
    try:
        asyncio.run(attempt(config, steps, stop))
    except BaseException as error:  # noqa: BLE001 - a test judges it
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return error
    return None


def committed(run: Path) -> int:
    """The newest whole checkpoint, whose steps all have a line in the journal."""
    found, _ = newest(run / "recover")
    version = found.state.version if found else 0
    file = run / "recover/journal.jsonl"
    steps = Journal(file, read_header(file)["data"]).steps()
    if [step.groups for step in steps[:version]] != [[number] for number in range(version)]:
        raise AssertionError(f"of {version} steps the journal has {steps}")
    return version


def check_end(run: Path) -> None:
    """Everything is there once."""
    assert committed(run) == ALL
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sorted(row["step"] for row in rows if "train/loss" in row) == list(range(1, ALL + 1)), rows
    assert sorted(row["step"] for row in rows if "reward/held_out" in row) == list(range(1, ALL + 1)), rows
    assert json.loads((run / "summary.json").read_text())["steps"] == ALL
    samples = {run / f"samples/step-{step:06}.jsonl" for step in range(1, ALL + 1)}
    assert {*(run / "samples").iterdir()} <= samples  # a run does not end for what it does not need
    assert (run / "report.html").read_text().endswith("</script>\n")
    read_events(run)


def case(faults: Any, config: Any, begun: Path | None, number: int, code: int) -> str:
    """Fail one call of the command, then run it again; returns what was wrong, "" if nothing."""
    run = config.run_dir
    shutil.rmtree(run, ignore_errors=True)
    if begun:
        shutil.copytree(begun, run)
    before = committed(run) if begun else 0
    faults.faults_arm(str(run).encode(), number, code)
    error = ending(config, ALL)
    faults.faults_disarm()
    what = f"call {number} ({faults.faults_failed().decode()}) with {errno.errorcode[code]}"
    try:
        if error is not None:
            if not isinstance(error, RunError) or str(run) not in str(error) or os.strerror(code) not in str(error):
                return f"{what}: ended with {type(error).__name__}: {error}"
            if (run / "recover/journal.jsonl").exists() and committed(run) < before:
                return f"{what}: lost a checkpoint ({error})"
            if again := ending(config, ALL):
                return f"{what}: {error}; then {type(again).__name__}: {again}"
        check_end(run)
    except Exception as problem:  # noqa: BLE001 - a test judges it
        return f"{what}: {type(problem).__name__} {problem} (after {error})"
    return ""


def main() -> None:
    library, folder, stride, offset = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    every_code = sys.argv[5:] == ["--every-error"]
    PICTURE.draw_rewards = lambda path, *_: path.write_text("picture")  # type: ignore[attr-defined]
    sys.modules[PICTURE.__name__] = PICTURE
    owner.SILENT_S = 0.2  # after a fault in an owner's file the next attempt waits for that
    faults = ctypes.CDLL(library)
    faults.faults_failed.restype = ctypes.c_char_p
    fixed = ("trial_name=t", f"cluster.fileroot={folder}", "recover.mode=auto", "stats_logger.console=false")
    config = load(CONFIG, [*fixed, "recover.restart=true"]).config
    ending(config, ALL)  # imports
    shutil.rmtree(config.run_dir)
    assert isinstance(stopped := ending(config, ALL, BEGUN), Stopped), stopped
    begun = config.run_dir.rename(folder / "begun")
    cases = 0
    for start in (begun, None):
        shutil.rmtree(config.run_dir, ignore_errors=True)
        if start:
            shutil.copytree(start, config.run_dir)
        faults.faults_arm(str(config.run_dir).encode(), -1, 0)
        assert (error := ending(config, ALL)) is None, error
        calls = faults.faults_disarm()
        for number in range(offset, calls, stride):
            codes = ERRORS if every_code else (ERRORS[number // stride % len(ERRORS)],)
            for code in codes:
                cases += 1
                if problem := case(faults, config, start, number, code):
                    print(problem, flush=True)
        print(f"{calls} calls", flush=True)
    print(f"{cases} cases", flush=True)


main()
