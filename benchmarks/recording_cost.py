"""Measure what recording steps for replay costs: CPU seconds of steps with it ÷ without it, in turns in one run.

    python -m benchmarks.recording_cost --config examples/math/gsm8k_grpo_cpu.yaml --steps 120 [key=value ...]

The run has `recover.replay=true`, and every other step is not recorded. `cpu_ratio` is the mean over pairs of
neighbours, each a recorded step ÷ the mean of the steps before and after it, in CPU seconds of the controller and the
trainer's ranks, where recording computes; servers are left out, as they generate meanwhile. `cpu_interval` has 95 % of
the means of resampled pairs. `ratio` is the median of the same pairs in seconds on the clock, which other jobs on the
machine disturb, and `waits` the median share of recorded steps in which training waited for the recorder. The first
steps, which warm up, do not count.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import psutil
import typer

from areal_like import train
from areal_like.backends.ray.lifetime import run_lifetime
from areal_like.capabilities.operations.processes import resident
from areal_like.capabilities.replay.recorder import Recorder
from areal_like.core.hooks import TrainingStep
from areal_like.metrics.record import Record
from benchmarks.report import save

FIRST = 5  # step that counts
RESAMPLES = 10_000
_PARTS = ("after_training", "after_publish")
_SAME = ("evaluator.freq_steps=null", "saver.freq_steps=null", "recover.freq_steps=15")  # in steps of both kinds


class CpuClock:
    """CPU seconds of the controller and the trainer's ranks in each step."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self._processes: list[psutil.Process] = []
        self._last = 0.0

    def note(self, step: int) -> None:
        """Note the end of a step."""
        if not self._processes:
            names = {each.pid: each.name for each in resident(os.getpid())}
            self._processes = [
                psutil.Process(pid) for pid, name in names.items() if name == "controller" or name.startswith("actor-")
            ]
        times = [each.cpu_times() for each in self._processes]
        now = sum(each.user + each.system for each in times)
        self.seconds[step], self._last = now - self._last, now


def main(
    config: Annotated[Path, typer.Option()],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value ...")] = None,
    steps: int = 120,
    name: Annotated[str, typer.Option(help="of the file in benchmarks/results")] = "recording_cost_cpu",
) -> None:
    clock, report = CpuClock(), Record.step

    def note(self: Record, step: int, *arguments: Any, **options: Any) -> None:
        report(self, step, *arguments, **options)
        clock.note(step)

    parts = {part: every_other(getattr(Recorder, part)) for part in _PARTS}
    with run_lifetime(secrets.token_hex(6)) as folder:
        keys = [f"cluster.fileroot={folder}", f"total_train_steps={steps}", "recover.mode=auto", "recover.replay=true"]
        with patch.multiple(Recorder, **parts), patch.object(Record, "step", note):
            directory = train(config, [*keys, *_SAME, *(overrides or [])])
        lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
        rows = [line for line in lines if "seconds/step" in line]
        sizes = [file.stat().st_size for file in (directory / "recover/replay").glob("*.safetensors")]
    figures = describe(rows, clock.seconds)
    for what, ratio, bounds in (("CPU", "cpu_ratio", "cpu_interval"), ("clock", "ratio", "interval")):
        print(f"recorded / unrecorded, {what}: {figures[ratio]}, 95 % in {figures[bounds]}")
    save(name, figures | {"file_bytes": statistics.median(sizes)})


def describe(rows: list[dict[str, Any]], cpu: Mapping[int, float]) -> dict[str, Any]:
    """Return the figures of a run with these metrics, and with these CPU seconds in each step."""
    seconds = {int(row["step"]): float(row["seconds/step"]) for row in rows}
    of_cpu, of_clock = compare(cpu), compare(seconds)
    recorded = [row for row in rows if is_recorded(int(row["step"])) and row["step"] >= FIRST]
    waits = [row["seconds/recording"] / row["seconds/step"] for row in recorded]
    return {
        "pairs": len(of_cpu),
        "cpu_ratio": round(statistics.mean(of_cpu), 4),
        "cpu_interval": interval(of_cpu),
        "ratio": round(statistics.mean(of_clock), 4),
        "interval": interval(of_clock),
        "waits": round(statistics.median(waits), 4),
        "cpu_seconds": {step: round(each, 3) for step, each in cpu.items()},
        "seconds": seconds,
    }


def interval(ratios: Sequence[float]) -> list[float]:
    """Return the bounds of 95 % of the means of resampled ratios."""
    means = np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios))).mean(axis=1)
    return [round(bound, 4) for bound in np.percentile(means, [2.5, 97.5]).tolist()]


def is_recorded(step: int) -> bool:
    """Return whether this step is recorded."""
    return step % 2 == 0


def every_other(act):  # type: ignore[no-untyped-def]
    """Return a method of the recorder that does nothing in steps that are not recorded."""

    async def act_if_recorded(self: Recorder, step: TrainingStep) -> None:
        if is_recorded(step.done):
            await act(self, step)

    return act_if_recorded


def compare(seconds: Mapping[int, float]) -> list[float]:
    """Return the ratio of each recorded step to its neighbours."""
    return [
        seconds[step] / statistics.mean([seconds[step - 1], seconds[step + 1]])
        for step in sorted(seconds)
        if is_recorded(step) and step >= FIRST and step - 1 in seconds and step + 1 in seconds
    ]


if __name__ == "__main__":
    typer.run(main)
