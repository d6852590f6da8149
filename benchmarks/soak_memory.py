"""Train agents on a CPU for many minutes, and record the memory of every process each minute.

    python -m benchmarks.soak_memory [--minutes 120] [--name soak_memory_cpu] [key=value ...]

The run is the shell agent (examples/workflows/terminal_cpu.yaml) with a small batch and endless epochs; it needs
bubblewrap. A minute counts from the first step. The growth of a process is the slope of a line through the anonymous
memory of its second half, in MiB per hour: caches fill in the first half. Processes that live shorter, such as
sandboxes, are left out. Writes benchmarks/results/NAME.json every minute.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import linear_regression
from typing import Any

from areal_like.capabilities.operations.processes import resident
from areal_like.metrics.lines import read_rows
from benchmarks.report import save

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
SETTINGS = (
    *("experiment_name=soak", "trial_name=run", "recover.mode=auto", "recover.freq_steps=20", "saver.freq_steps=null"),
    *("total_train_steps=1000000", "total_train_epochs=1000000", "train_dataset.batch_size=4", "gconfig.n_samples=4"),
    *("actor.optimizer.lr=1e-5", "actor.optimizer.lr_scheduler_type=constant", "actor.optimizer.min_lr_ratio=0"),
    *("evaluator.freq_steps=50", "evaluator.at_start=false", "warm_start.steps=100", "stats_logger.console=false"),
    *("scheduler.startup_timeout_s=1500", "rollout.startup_timeout_s=1500"),
)
LONGEST_START_S = 1800.0
LIVES = 0.9  # least share of the looks in which a process is reported


def watch(process: "subprocess.Popen[bytes]", directory: Path, minutes: int, name: str) -> None:
    """Read the memory of all processes each minute until the run has trained for `minutes`."""
    wait_for_step(process, directory)
    began, looks = time.time(), list[dict[tuple[str, int], tuple[int, int]]]()
    commands = dict[int, str]()  # of the first look: a worker of Ray has the name of what it does
    for minute in range(minutes + 1):
        time.sleep(max(0.0, began + 60 * minute - time.time()))
        if process.poll() is not None:
            raise SystemExit(f"the run ended after {minute} minutes with exit code {process.returncode}")
        looks.append({(each.name, each.pid): (each.resident, each.private) for each in resident(process.pid)})
        commands = {pid: command_name(pid) for _, pid in looks[-1]} | commands
        rows = read_rows(directory / "metrics.jsonl", dict[str, int | float | None])
        steps = [row["step"] for row in rows if "seconds/step" in row]
        save(name, {"minutes": minute, "steps": steps[-1], "processes": describe(looks, commands)})


def wait_for_step(process: "subprocess.Popen[bytes]", directory: Path) -> None:
    """Return when the run has trained a step."""
    deadline = time.time() + LONGEST_START_S
    while not (file := directory / "metrics.jsonl").exists() or "seconds/step" not in file.read_text():
        if process.poll() is not None or time.time() > deadline:
            raise SystemExit("the run trained no step")
        time.sleep(1)


def command_name(pid: int) -> str:
    """Return the name of a process's program, or the one that it has given itself, as several belong to Ray."""
    with suppress(OSError):  # ended meanwhile
        return Path(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0].strip()).name
    return ""


def describe(looks: list[dict[tuple[str, int], tuple[int, int]]], commands: dict[int, str]) -> list[dict[str, Any]]:
    """Return the memory of each process that lived nearly as long as the run, the largest first."""
    found = []
    for name, pid in {key for look in looks for key in look}:
        series = [(minute, *look[name, pid]) for minute, look in enumerate(looks) if (name, pid) in look]
        if len(series) < LIVES * len(looks):
            continue
        late = series[len(series) // 2 :]
        slope = linear_regression([each[0] for each in late], [each[2] for each in late]).slope if late[1:] else 0.0
        found.append(
            {
                "name": name,
                "command": commands[pid],
                "growth_mib_per_hour": round(60 * slope / MIB, 2),
                "resident_mib": [round(each[1] / MIB) for each in series],
                "private_mib": [round(each[2] / MIB, 1) for each in series],
            }
        )
    return sorted(found, key=lambda item: -item["resident_mib"][-1])


def main() -> None:
    """Start the run, watch it, and end it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=120)
    parser.add_argument("--name", default="soak_memory_cpu", help="of the file in benchmarks/results")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / "examples/math/gsm8k_rl.py", "--config"]
        command += [ROOT / "examples/workflows/terminal_cpu.yaml", *SETTINGS, f"cluster.fileroot={folder}"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen([*command, *options.settings], env=env, start_new_session=True)
        try:
            watch(process, Path(folder) / "soak/run", options.minutes, options.name)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


if __name__ == "__main__":
    main()
