"""The files and lines of a run's numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from limits import HUNG_S
from running import undocumented_files

from allocation import Finding, Severity, Source
from areal_like.capabilities.report.run_page import RunPage
from areal_like.metrics.console import COLUMNS, View, complain
from areal_like.metrics.record import Record
from areal_like.metrics.sinks.tensorboard import TensorBoard

STATS = {"reward": 0.5, "loss": -0.01, "kl": 2e-5, "entropy": 1.5, "clip_share": 0.02, "staleness_mean": 0.75}
STATS |= {"tokens": 300.0, "reward_missing": 0.0}
EVALUATED = {0: 0.25, 2: 0.75}


def record_run(directory: Path, held_out: Mapping[int, float] = EVALUATED) -> None:
    """Two steps, and an evaluation after each step in `held_out`."""
    record = Record(directory, "a title", View(enabled=True), [TensorBoard(directory / "tensorboard")])
    if 0 in held_out:
        record.held_out(0, {"valid_dataset": {"mean@1": held_out[0], "pass@1": 0.0}})
    for step in (1, 2):
        with record.phase("training"):
            time.sleep(0.01)
        if step in held_out:
            record.held_out(step, {"valid_dataset": {"mean@1": held_out[step], "pass@1": 0.0}})
        record.step(step, STATS | ({"logprob_diff": 1e-6} if step == 1 else {}), tokens_generated=100 * step)
    record.finish()
    record.close()


def test_a_piped_table_has_one_line_per_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_run(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    (header,) = [line for line in lines if "reward     eval" in line]
    assert header.split() == list(COLUMNS)
    explained = lines[: lines.index(header)]  # once, before the first one
    assert [line.startswith("Each row is a step: mean reward") for line in explained].count(True) == 1
    first, second = lines[lines.index(header) + 1 : lines.index(header) + 3]
    assert len(first) == len(second) == len(header)  # columns stay below their names, where a value is missing too
    assert first.split()[:6] == ["1", "0.500", "-0.01", "2e-05", "1.500", "0.020"]
    assert second.split()[:3] == ["2", "0.500", "0.750"]


@pytest.mark.parametrize(
    ("held_out", "said"),
    [
        (EVALUATED, ["evaluation reward: 0.250 at step 0 -> 0.750 at step 2 of 2"]),
        ({0: 0.25, 1: 0.5}, ["evaluation reward: 0.250 at step 0 -> 0.500 at step 1 of 2"]),
        ({0: 0.25}, ["evaluation reward: 0.250 at step 0 of 2"]),
        ({2: 0.75}, ["evaluation reward: 0.750 at step 2 of 2"]),
        ({}, []),
    ],
    ids=str,
)
def test_the_last_line_names_the_steps_that_were_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], held_out: Mapping[int, float], said: list[str]
) -> None:
    record_run(tmp_path, held_out)
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("evaluation reward:")] == said


def test_a_run_without_a_console_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    view = View(enabled=False)
    with view.live(), view.doing("something", 3) as advance:
        advance()
        view.say("done")
        view.row({"step": 1})
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_has_gone_away_ends_no_run(stream: str):
    """As `tee` at Ctrl-C, which reaches it too."""
    says = {"stdout": "View(enabled=True).say", "stderr": "lambda text: complain([text])"}[stream]
    code = f"""
from areal_like.metrics.console import View, complain
say = {says}
for _ in range(1000):
    say("x" * 1000)
raise SystemExit(130)
"""
    ends = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", code], **{stream: ends[1]})  # type: ignore[call-overload]
    for end in ends:
        os.close(end)
    assert process.wait(HUNG_S) == 130


def test_the_summary_and_the_picture_are_written(tmp_path: Path) -> None:
    record_run(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == {"steps": 2, "held_out": {"0": 0.25, "2": 0.75}, "rewards": {"1": 0.5, "2": 0.5}}
    assert (tmp_path / "rewards.png").read_bytes().startswith(b"\x89PNG")


def test_tensorboard_gets_each_step_s_own_tokens_and_seconds(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record_run(tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    values = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    assert values["reward/held_out"] == {0: 0.25, 2: 0.75}
    assert sorted(values["rollout/logprob_diff_server_trainer"]) == [1]
    for step in (1, 2):
        training, whole = values["seconds/training"][step], values["seconds/step"][step]
        assert 0.01 <= training <= whole
        assert values["throughput/train_tokens_per_second"][step] == pytest.approx(300 / training, rel=1e-5)
        assert values["throughput/rollout_tokens_per_second"][step] == pytest.approx(100 / whole, rel=1e-5)


def test_several_sets_are_recorded_by_name_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record = Record(tmp_path, "a title", View(enabled=True), [TensorBoard(tmp_path / "tensorboard")])
    record.held_out(
        4, {"math": {"mean@2": 0.25, "pass@1": 0.25, "pass@2": 0.5}, "code": {"mean@1": 0.75, "pass@1": 0.5}}
    )
    record.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    values = {tag: event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}
    assert values == {
        "reward/held_out": 0.5,
        "evaluation/math/mean@2": 0.25,
        "evaluation/math/pass@1": 0.25,
        "evaluation/math/pass@2": 0.5,
        "evaluation/code/mean@1": 0.75,
        "evaluation/code/pass@1": 0.5,
    }
    said = "  evaluation at step 4: math mean@2 0.250, pass@1 0.250, pass@2 0.500; code mean@1 0.750, pass@1 0.500\n"
    assert capsys.readouterr().out == said


def test_phases_add_up_and_start_anew(tmp_path: Path) -> None:
    numbers: list[dict[str, float]] = []

    class Sink:
        def log(self, step: int, scalars: Mapping[str, float]) -> None:
            numbers.append({name: value for name, value in scalars.items() if name.startswith("seconds/")})

        def close(self) -> None: ...

    record = Record(tmp_path, "a title", View(enabled=False), [Sink()])
    with record.phase("before the first step"):
        record.start()
    for step, phases in ((1, 2), (2, 0)):
        for _ in range(phases):
            with record.phase("waiting for rollouts"):
                time.sleep(0.01)
        record.step(step, STATS, tokens_generated=step)
    record.close()
    first, second = numbers
    assert {"seconds/waiting_for_rollouts", "seconds/step"} <= first.keys()
    assert 0.02 <= first["seconds/waiting_for_rollouts"] <= first["seconds/step"]
    assert second.keys() == {"seconds/step"}


@pytest.mark.parametrize("stream", ["out", "err"])
def test_what_users_code_raises_cannot_move_a_terminals_cursor(stream, capsys):
    """An exception of an agent quotes what a model wrote; `\\x9b` begins a command as `\\x1b[` does."""
    text = "first\n\tValueError: \x1b[2J\x1b]0;title\x07 \x9b1m \r \u202e [bold] é"
    if stream == "out":
        View(enabled=True).say(text)
    else:
        complain([text, Finding("RUN-X", Severity.ERROR, text, Source(text))])
    printed = getattr(capsys.readouterr(), stream)
    assert r"first" + "\n" in printed and r"\x1b[2J\x1b]0;title\x07 \x9b1m \r \u202e [bold] é" in printed
    assert all(c.isprintable() or c in "\n\t" for c in printed)


def test_names_of_reward_parts_are_limited_with_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = dict[str, int]()

    class Sink:
        def log(self, step: int, scalars: Mapping[str, float]) -> None:
            seen.update({name: step for name in scalars if "reward_parts/" in name})

        def close(self) -> None: ...

    record = Record(tmp_path, "a title", View(enabled=True), [Sink()])
    record.start()
    for step in range(1, 9):
        changing = {f"reward_parts/row-{step}-{row}": 1.0 for row in range(300)}
        stats = {"reward": 0.5, "reward_parts/format": 1.0, "math/reward_parts/" + "x" * 10_000: 1.0, **changing}
        record.step(step, stats, 0)
    record.close()
    assert len(seen) == 100 and seen["reward_parts/format"] == 8
    told = capsys.readouterr().out
    assert told.count("warning") == 1 and "reward.function" in told and len(told) < 5000


def test_every_file_of_a_record_has_a_row_with_its_limit(tmp_path: Path) -> None:
    record = Record(
        tmp_path, "a title", View(enabled=False), [TensorBoard(tmp_path / "tensorboard")], listeners=[RunPage(tmp_path)]
    )
    record.start()
    record.step(1, {"reward": 0.5}, 0)
    record.finish()
    record.close()
    names = [
        "checkpoints/step-1/config.json",
        "logs/actor-0.log",
        "recover/owner-1.json",
        "recover/step-2/actor/.metadata",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert len(list(tmp_path.iterdir())) >= 9
    assert undocumented_files(tmp_path) == []
    (tmp_path / "logs/other.txt").touch()
    assert undocumented_files(tmp_path) == ["logs/other.txt"]
