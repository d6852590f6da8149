"""Measure what recording steps for replay costs: seconds of steps with it ÷ without it, in turns in one run.

    python -m benchmarks.recording_cost --config examples/math/gsm8k_grpo_cpu.yaml --steps 40 [key=value ...]

The run has `recover.replay=true`, and every other step is not recorded. `ratio` is the median over pairs of neighbours,
each a recorded step ÷ the mean of the steps before and after it; the first steps, which warm up, do not count. `waits`
is the median share of recorded steps in which training waited for the recorder.
"""

from __future__ import annotations

import json
import secrets
import statistics
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import typer

from areal_like import train
from areal_like.backends.ray.lifetime import run_lifetime
from areal_like.capabilities.replay.recorder import Recorder
from areal_like.core.hooks import TrainingStep
from benchmarks.report import save

FIRST = 5  # step that counts
_PARTS = ("after_training", "after_publish")


def main(
    config: Annotated[Path, typer.Option()],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value ...")] = None,
    steps: int = 40,
    name: Annotated[str, typer.Option(help="of the file in benchmarks/results")] = "recording_cost_cpu",
) -> None:
    with run_lifetime(secrets.token_hex(6)) as folder:
        keys = [f"cluster.fileroot={folder}", f"total_train_steps={steps}", "recover.mode=auto", "recover.replay=true"]
        with patch.multiple(Recorder, **{part: every_other(getattr(Recorder, part)) for part in _PARTS}):
            directory = train(config, [*keys, *(overrides or [])])
        lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
        steps_of = [line for line in lines if "seconds/step" in line]
        seconds = {int(line["step"]): float(line["seconds/step"]) for line in steps_of}
        waits = [
            line["seconds/recording"] / line["seconds/step"] for line in steps_of if is_recorded(int(line["step"]))
        ]
        sizes = [file.stat().st_size for file in (directory / "recover/replay").glob("*.safetensors")]
    ratios = compare(seconds)
    figures = {"ratio": round(statistics.median(ratios), 4), "ratios": [round(ratio, 4) for ratio in ratios]}
    figures["waits"] = round(statistics.median(waits[FIRST // 2 :]), 4)
    print(f"recorded / unrecorded = {figures['ratio']}, waited {figures['waits']} of a step")
    save(name, figures | {"file_bytes": statistics.median(sizes), "seconds": seconds})


def is_recorded(step: int) -> bool:
    """Return whether this step is recorded."""
    return step % 2 == 0


def every_other(act):  # type: ignore[no-untyped-def]
    """Return a method of the recorder that does nothing in steps that are not recorded."""

    async def act_if_recorded(self: Recorder, step: TrainingStep) -> None:
        if is_recorded(step.done):
            await act(self, step)

    return act_if_recorded


def compare(seconds: dict[int, float]) -> list[float]:
    """Return the ratio of each recorded step to its neighbours."""
    return [
        seconds[step] / statistics.mean([seconds[step - 1], seconds[step + 1]])
        for step in sorted(seconds)
        if is_recorded(step) and step >= FIRST and step - 1 in seconds and step + 1 in seconds
    ]


if __name__ == "__main__":
    typer.run(main)
