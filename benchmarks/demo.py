"""Run an example with other settings, usually the CPU demo, and measure rewards, seconds and CPU seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from areal_like.core.config.load import load
from areal_like.core.config.schema import RunConfig
from benchmarks.report import ROOT

SCRIPT = ROOT / "examples/math/gsm8k_rl.py"
CONFIG = ROOT / "examples/math/gsm8k_grpo_cpu.yaml"
MARK = "AREAL_LIKE_BENCHMARK"  # in the environment of a run's processes
POLL_S = 2.0


def demo(settings: Sequence[str], target: float, limit_s: float, config: Path = CONFIG) -> dict[str, Any]:
    """Return the result of one run; samples up to evaluation reward `target` include dropped groups."""
    with tempfile.TemporaryDirectory() as folder:
        where = [f"cluster.fileroot={folder}", "experiment_name=demo", "trial_name=run"]
        command = [sys.executable, str(SCRIPT), "--config", str(config), *where, *settings]
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, MARK: folder})
        used = watched(process, folder, limit_s)
        if process.wait() not in (0, 143, -15):  # -15: the limit met a run that was leaving
            raise SystemExit(f"the run with {settings} failed with exit code {process.returncode}")
        board = Path(folder) / "demo/run/tensorboard"
        return {"settings": settings, **figures(board, load(config, settings).config, target, used)}


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


def figures(board: Path, config: RunConfig, target: float, used: Mapping[float, float]) -> dict[str, Any]:
    """Return figures from a run's events; `used` has processor seconds by time."""
    events = EventAccumulator(str(board)).Reload()
    held_out = events.Scalars("reward/held_out")
    reached = next((event for event in held_out if event.value >= target), None)
    dropped = events.Scalars("rollout/dropped_groups") if "rollout/dropped_groups" in events.Tags()["scalars"] else []
    replaced = sum(event.value for event in dropped if reached and event.step <= reached.step)
    start = held_out[0].wall_time

    def cpu_s(until: float) -> float:
        at, seconds = np.array([*used]), np.array([*used.values()])
        return float(np.interp(until, at, seconds) - np.interp(start, at, seconds))

    groups = reached and reached.step * config.train_dataset.batch_size + replaced
    return {
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
