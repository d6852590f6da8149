"""Measure the size of weight deltas of the CPU demo, as a share of a full copy, by data type and learning rate.

    python -m benchmarks.weight_deltas --steps 40

Each case runs the demo with `weight_update.mode=disk` and one full copy. `share` is the size of each version's file ÷
the bytes of the weights; `from_step_10` has the median and the largest share from step 10 on.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from areal_like.metrics.event_file import read_events
from benchmarks.demo import CONFIG, SCRIPT
from benchmarks.report import ROOT, save

CASES = {
    "float32, the demo's learning rate": [],
    "bfloat16, the demo's learning rate": ["actor.dtype=bfloat16"],
    "bfloat16, learning rate 1e-5": ["actor.dtype=bfloat16", "actor.optimizer.lr=1e-5"],
    "bfloat16, learning rate 1e-6": ["actor.dtype=bfloat16", "actor.optimizer.lr=1e-6"],
}


def main(steps: Annotated[int, typer.Option(help="training steps of each case")] = 40) -> None:
    """Run all cases and write the figures."""
    save("weight_deltas_cpu", {"cases": [{"case": case, **measure(CASES[case], steps)} for case in CASES]})


def measure(settings: list[str], steps: int) -> dict[str, Any]:
    """Return the file sizes of one run."""
    every = [f"total_train_steps={steps}", "weight_update.mode=disk", f"weight_update.full_every={steps + 2}"]
    with tempfile.TemporaryDirectory() as folder:
        where = [f"cluster.fileroot={folder}", "experiment_name=demo", "trial_name=run"]
        command = [sys.executable, str(SCRIPT), "--config", str(CONFIG), *where, *every, *settings]
        subprocess.run(command, cwd=ROOT, check=True)
        files = [event.ids for event in read_events(Path(folder) / "demo/run") if event.name == "file"]
    shares = {file["version"]: round(file["bytes"] / file["weights"], 4) for file in files}
    late = [share for version, share in shares.items() if version >= 10]
    return {
        "settings": [*every, *settings],
        "bytes_of_weights": files[0]["weights"],
        "from_step_10": {"median": statistics.median(late), "largest": max(late)},
        "share": shares,
    }


if __name__ == "__main__":
    typer.run(main)
