"""A disk that takes no more, or a directory that is gone, ends a run with one sentence."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import typer

from areal_like import cli, launch
from areal_like.capabilities.report.run_page import RunPage
from areal_like.errors import RecordError
from areal_like.job import Job
from areal_like.metrics.console import View
from areal_like.metrics.record import Record
from areal_like.metrics.sinks.scalars import Scalars
from areal_like.metrics.sinks.tensorboard import TensorBoard
from areal_like.types import FinishReason, Trajectory

CONFIG = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_cpu.yaml"


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def finished_record(directory: Path) -> Record:
    record = Record(directory, "a title", View(enabled=False))
    with record.phase("training"):
        pass
    names = ("reward", "loss", "kl", "entropy", "clip_share", "staleness_mean", "tokens")
    record.step(1, dict.fromkeys(names, 0.5), tokens_generated=100)
    return record


def record_a_step(directory: Path) -> None:
    record = Record(directory, "a title", View(enabled=False), listeners=[RunPage(directory)], decode=str)
    tokens = np.zeros(1, np.int32)
    item = Trajectory(0, 0, tokens, np.zeros(1, np.float32), tokens, FinishReason.STOP, 1.0)
    asyncio.run(record.samples(2, [item]))
    with record.recording(), record.phase("training"):
        pass
    record.step(2, {"reward": 1.0}, tokens_generated=1)
    record.close()


def test_an_event_that_does_not_fit_is_noticed_at_its_own_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    board = TensorBoard(tmp_path / "tensorboard")
    board.log(1, {"a": 1.0})
    (file,) = (tmp_path / "tensorboard").iterdir()
    with largest_file(file.stat().st_size + 10):
        with pytest.raises(RecordError) as raised:
            board.log(2, {"a": 1.0})
        with pytest.raises(RecordError):  # what is left of the event does not fit either
            board.close()
    assert str(raised.value) == f"{file} cannot be written: File too large"
    assert capfd.readouterr() == ("", "")


def test_events_have_no_place_where_a_file_stands(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(RecordError, match=r"tensorboard/events\S+ cannot be written: File exists"):
        TensorBoard(tmp_path / "tensorboard")


@pytest.mark.parametrize("name", ["rewards.png", "summary.json"])
def test_a_full_disk_at_the_end(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(RecordError) as raised:
        finished_record(tmp_path).finish()
    assert str(raised.value) == f"{tmp_path / name} cannot be written: No space left on device"


@pytest.mark.parametrize("name", ["run.json", "report.html"])
def test_a_full_disk_at_the_start(tmp_path: Path, name: str) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(RecordError) as raised:
        record_a_step(tmp_path)
    assert str(raised.value) == f"{tmp_path / name} cannot be written: No space left on device"


@pytest.mark.parametrize("name", ["events.jsonl", "samples/step-000002.jsonl"])
def test_a_full_disk_ends_no_run_for_what_it_does_not_need(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / name).symlink_to("/dev/full")
    record_a_step(tmp_path)
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "No space left on device" in line]
    assert said.startswith(
        f"{tmp_path / name} cannot be written: No space left on device; training continues without it"
    )


def test_a_page_that_does_not_fit_any_more_stays_whole_and_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = Record(tmp_path, "a title", View(enabled=False), listeners=[RunPage(tmp_path)])
    record._writer.wait()
    page = tmp_path / "report.html"
    with largest_file(page.stat().st_size + 300):
        for step in range(1, 9):
            record.step(step, {"reward": 1.0, "loss": 0.5}, tokens_generated=step)
        record.close()
    assert capsys.readouterr().err.count("File too large") == 1
    assert page.read_text().endswith("</script>\n")


def test_numbers_that_do_not_fit_end_the_run(tmp_path: Path) -> None:
    record = Record(tmp_path, "a title", View(enabled=False), [Scalars(tmp_path / "metrics.jsonl")])
    record.step(1, {"reward": 1.0}, tokens_generated=1)
    record.state(1)
    file = tmp_path / "metrics.jsonl"
    before = file.read_text()
    with largest_file(len(before) + 10):
        record.step(2, {"reward": 1.0}, tokens_generated=2)
        with pytest.raises(RecordError) as raised:
            record.state(2)
    assert str(raised.value) == f"{file} cannot be written: File too large"
    assert file.read_text() == before


def test_a_directory_that_was_moved_away(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    record = finished_record(directory)
    directory.rename(tmp_path / "elsewhere")
    with pytest.raises(RecordError) as raised:
        record.finish()
    assert str(raised.value) == f"{directory / 'rewards.png'} cannot be written: No such file or directory"


@pytest.mark.parametrize("grouped", [False, True])
def test_the_command_line_tells_it_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], grouped: bool
) -> None:
    async def full(job: Job, view: View) -> None:
        error = RecordError("runs/e/t/summary.json cannot be written: No space left on device")
        raise ExceptionGroup("tasks", [error]) if grouped else error

    monkeypatch.setattr(launch, "run", full)
    with pytest.raises(typer.Exit) as ended:
        cli.main(CONFIG, ["trial_name=t"])
    assert ended.value.exit_code == cli.FAILED
    message = "The run failed: runs/e/t/summary.json cannot be written: No space left on device\n"
    assert capsys.readouterr() == ("", message)
