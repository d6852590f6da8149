"""What a long run with many servers leaves stays small, and shows its first steps as well as its last ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from areal_like.capabilities.report import page as page_module
from areal_like.capabilities.report import write
from areal_like.capabilities.report.run_page import RunPage
from areal_like.capabilities.report.write import write_report
from areal_like.metrics import event_file
from areal_like.metrics.console import View
from areal_like.metrics.event_file import read_events
from areal_like.metrics.names import METRICS_FILE
from areal_like.metrics.record import Record
from areal_like.metrics.rollback import forget
from areal_like.metrics.samples import list_written
from areal_like.metrics.sinks.scalars import Scalars
from areal_like.types import FinishReason, Trajectory

SERVERS, MOST = 64, 50e6
NAMES = [f"numbers/of_a_run_{number}" for number in range(60)]


def train(directory: Path, steps: int, groups: int, first: int = 1) -> None:
    """Record steps of one second each: what 64 servers, 8 ranks and the groups did, 60 numbers, and samples."""
    record = Record(
        directory,
        "t",
        View(False),
        [Scalars(directory / METRICS_FILE)],
        about={},
        listeners=[RunPage(directory)],
        decode=str,
        n_samples=8,
    )
    random.seed(1)
    tokens, made = np.arange(300, dtype=np.int32), np.full(300, 3, np.int32)
    sample = Trajectory(0, 0, tokens, np.zeros(300, np.float32), made, FinishReason.STOP, 1.0)

    async def make_steps() -> None:
        for step in range(first, first + steps):
            for lane, name, start in spans():
                record._log.note(lane, name, step + start, step + start + 0.3, step=step)
            for group in range(groups):
                record._log.note("groups", "group", step, step + 0.9, group=step * groups + group)
            if step % 10 == 0 or steps < 1000:
                await record.samples(step, [sample] * 8)
            record.step(step, {name: random.random() for name in NAMES} | {"reward": step / steps}, step)
            if step % 50 == 0:
                await asyncio.to_thread(record.state, step)  # as a checkpoint does

    asyncio.run(make_steps())
    record.end("finished")
    record.close()


def spans() -> Iterator[tuple[str, str, float]]:
    for server in range(SERVERS):
        yield f"server {server}", "generating", 0.0
        yield f"server {server}", "weight update", 0.5
    for rank in range(8):
        yield f"actor {rank}", "training", 0.2
    yield "controller", "training", 0.2
    yield "controller", "weight update", 0.5


def sizes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in directory.iterdir() if path.is_file()}


def test_files_are_bounded_and_curves_keep_their_peaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With bounds of one twentieth."""
    monkeypatch.setattr(event_file, "SEGMENT_BYTES", 300_000)
    monkeypatch.setattr(page_module, "PAGE_BYTES", 2_000_000)
    monkeypatch.setattr(write, "MOST_SPANS", 5_000)
    monkeypatch.setattr(write, "LAST_ROWS", 20)
    monkeypatch.setattr(write, "MOST_POINTS", 100)
    train(tmp_path, 400, groups=16)
    found = sizes(tmp_path)
    assert found["events.jsonl"] + found["events.previous.jsonl"] < 1_000_000
    assert found["report.html"] < 2_100_000
    assert len(list_written(tmp_path)) <= 200
    assert list_written(tmp_path)[0][0] == 1 and list_written(tmp_path)[-1][0] == 400
    assert [event.name for event in read_events(tmp_path) if event.lane == "run"] == ["finished"]

    lines = (tmp_path / METRICS_FILE).read_text().splitlines()
    lines[199] = lines[199].replace('"reward/mean": 0.5', '"reward/mean": 77.0')
    (tmp_path / METRICS_FILE).write_text("\n".join(lines) + "\n")
    write_report([tmp_path], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "77.0]" in page and "[1,0.0025]" in page.replace(" ", "") and '"scalars",[400,' in page.replace(" ", "")


def test_a_resume_appends_to_the_page(tmp_path: Path) -> None:
    train(tmp_path, 30, groups=2)
    before = (tmp_path / "report.html").read_bytes()
    with (tmp_path / "report.html").open("ab") as page:
        page.write(b'<script>add(0,"scalars",[31,{"reward/me')  # a kill
    forget(tmp_path, 21)
    resumed = RunPage(tmp_path)
    resumed.forget(21)
    resumed.close()
    after = (tmp_path / "report.html").read_bytes()
    assert after == before + b'<script>add(0,"forget",21)</script>\n'
    train(tmp_path, 10, groups=2, first=21)
    again = (tmp_path / "report.html").read_bytes()
    assert again.startswith(after)


@pytest.mark.long
def test_ten_thousand_steps_with_64_servers_stay_below_50_megabytes(tmp_path: Path) -> None:
    train(tmp_path, 10_000, groups=64)
    found = sizes(tmp_path)
    print(found)
    assert found["report.html"] < MOST
    assert found["events.jsonl"] + found["events.previous.jsonl"] < MOST
    assert sum(path.stat().st_size for path in (tmp_path / "samples").iterdir()) < MOST
