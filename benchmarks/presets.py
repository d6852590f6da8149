"""What each algorithm makes of the CPU demo: seconds, processor seconds and samples to a held-out reward, and the last.

    python -m benchmarks.presets [--presets grpo,ppo] [--target 0.9] [--limit-s 900] [key=value ...]

Each preset is run once with its own defaults, which the demo's `eps_clip` and `eps_clip_higher` would hide, and with
what it cannot do without. Seconds count from the evaluation before the first step; evaluations are included. Processor
seconds are those of all processes of the run, which depend less on what else the machine does. Figures are added to
those of other presets in the file, from which `python docs/generate/presets.py` writes the table of docs/algorithms.md;
a run that outlasts the limit is ended, and its last evaluation counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from areal_like.config.load import load
from benchmarks.report import ROOT, save

SCRIPT = ROOT / "examples/math/gsm8k_rl.py"
CONFIG = ROOT / "examples/math/gsm8k_grpo_cpu.yaml"
RESULTS = ROOT / "benchmarks/results/presets_cpu.json"
MARK = "AREAL_LIKE_PRESET"  # in the environment of a run's processes
POLL_S = 2.0
PRESETS = {
    "grpo": (),
    "dr_grpo": (),
    "dapo": (),
    "rloo": (),
    "reinforce_pp": (),
    "gspo": (),
    "cispo": (),
    "ppo": ("critic={}",),
    "dpo": ("ref={}", "actor.ppo_n_minibatches=1"),
}


def main(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value ...")] = None,
    presets: str = ",".join(PRESETS),
    target: float = 0.9,
    limit_s: float = 900,
) -> None:
    for name in presets.split(","):
        result = run(name, overrides or [], target, limit_s)
        print(name, {key: value for key, value in result.items() if key != "held_out"}, flush=True)
        known = json.loads(RESULTS.read_text())["presets"] if RESULTS.exists() else {}
        save("presets_cpu", {"target": target, "presets": known | {name: result}})


def run(name: str, overrides: Sequence[str], target: float, limit_s: float) -> dict[str, Any]:
    """One run; `samples` are those of the steps until then, dropped groups included."""
    settings = ["actor.eps_clip=null", "actor.eps_clip_higher=null", f"algorithm={name}", *PRESETS[name], *overrides]
    with tempfile.TemporaryDirectory() as folder:
        where = [f"cluster.fileroot={folder}", f"experiment_name={name}", "trial_name=run"]
        command = [sys.executable, str(SCRIPT), "--config", str(CONFIG), *where, *settings]
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, MARK: folder})
        used = watched(process, folder, limit_s)
        if process.wait() not in (0, 143):
            raise SystemExit(f"the run of {name} failed with exit code {process.returncode}")
        return figures(Path(folder) / name / "run/tensorboard", settings, target, used)


def watched(process: subprocess.Popen[bytes], mark: str, limit_s: float) -> dict[float, float]:
    """Processor seconds that all processes with the mark have used, by time; ends the run after `limit_s`."""
    used: dict[float, float] = {}
    each: dict[int, float] = {}
    deadline = time.monotonic() + limit_s
    while process.poll() is None:
        for one in psutil.process_iter():
            with suppress(psutil.Error, OSError):  # it has ended, or is another user's
                if one.environ().get(MARK) == mark:
                    times = one.cpu_times()
                    each[one.pid] = times.user + times.system
        used[time.time()] = sum(each.values())
        if time.monotonic() > deadline:
            process.terminate()  # it ends all of its own
            process.wait()
        time.sleep(POLL_S)
    return used


def figures(board: Path, settings: Sequence[str], target: float, used: Mapping[float, float]) -> dict[str, Any]:
    """What a run's events say; `used` has processor seconds by time."""
    events = EventAccumulator(str(board)).Reload()
    held_out = events.Scalars("reward/held_out")
    reached = next((event for event in held_out if event.value >= target), None)
    config = load(CONFIG, settings).config
    dropped = events.Scalars("rollout/dropped_groups") if "rollout/dropped_groups" in events.Tags()["scalars"] else []
    replaced = sum(event.value for event in dropped if reached and event.step <= reached.step)
    start = held_out[0].wall_time

    def cpu_s(until: float) -> float:
        at, seconds = np.array([*used]), np.array([*used.values()])
        return float(np.interp(until, at, seconds) - np.interp(start, at, seconds))

    groups = reached and reached.step * config.train_dataset.batch_size + replaced
    return {
        "settings": settings,
        "load_average": os.getloadavg()[0],
        "seconds_to_target": reached and reached.wall_time - start,
        "cpu_seconds_to_target": reached and cpu_s(reached.wall_time),
        "steps_to_target": reached and reached.step,
        "samples_to_target": groups and int(groups * config.gconfig.n_samples),
        "steps": held_out[-1].step,
        "seconds": held_out[-1].wall_time - start,
        "cpu_seconds": cpu_s(held_out[-1].wall_time),
        "final_reward": held_out[-1].value,
        "held_out": [[event.step, round(event.value, 5)] for event in held_out],
    }


if __name__ == "__main__":
    typer.run(main)
