"""Kill a run at random moments until it completes, for several seeds, and check that nothing is trained twice.

    python benchmarks/soak.py [--seeds 5] [--kills 5] [--minutes 60]

The run is a tiny CPU run with `recover.mode=fault`. At a random time after its start, or after its first step, one of
its processes, or all of them, receive SIGKILL. The run must end (it has one server, and `rollout.min_servers` is 1),
and the same command resumes it. At the end of each seed the journal must contain every group once, and the metrics
every step once. The lost work of a kill is the time from the last complete checkpoint, or from the start of the
attempt, to the kill. The share of training time is the seconds of committed steps divided by all seconds. Writes
benchmarks/results/soak_cpu.json after every kill and seed.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

from areal_like.checkpoint.journal import Journal, read_header
from areal_like.checkpoint.store import DIRECTORY, JOURNAL, newest
from areal_like.events import Event
from areal_like.metrics.event_file import read_events
from areal_like.metrics.lines import read_rows
from areal_like.metrics.names import METRICS_FILE

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/soak_cpu.json"
SCRIPT, CONFIG = ROOT / "examples/math/gsm8k_rl.py", ROOT / "examples/math/gsm8k_grpo_cpu.yaml"
STEPS, BATCH, EVALUATES = 60, 2, 5
SETTINGS = (
    *(
        "experiment_name=soak",
        "trial_name=run",
        "recover.mode=fault",
        "recover.restart=true",
        "recover.restarts_per_hour=0",
        "recover.freq_steps=2",
        "saver.freq_steps=7",
    ),
    *(f"total_train_steps={STEPS}", f"train_dataset.batch_size={BATCH}", "gconfig.n_samples=2", "warm_start=null"),
    *(f"evaluator.freq_steps={EVALUATES}", "evaluator.at_start=false", "valid_dataset.arithmetic.size=16"),
    *("actor.init_model.num_hidden_layers=1", "actor.init_model.hidden_size=64", "actor.ppo_n_minibatches=1"),
    *(f"train_dataset.arithmetic.size={STEPS * BATCH}", "scheduler.startup_timeout_s=600"),
    "rollout.startup_timeout_s=600",
)
LOGS = {"trainer rank": "actor-1.log", "server": "server-0.log"}
STARTING_S, TRAINING_S = 45.0, 12.0  # from an attempt's start, or from its first step, to a kill at the latest
LONGEST_S = 900.0  # of one attempt: hung


class Attempt:
    """One process of the command, in a directory that attempts share."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.directory = folder / "soak/run"
        self.output = (folder / "output.txt").open("ab")
        settings = (*SETTINGS, f"cluster.fileroot={folder}", f"seed={seed}")
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "--config", str(CONFIG), *settings],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=self.output,
            stderr=self.output,
            start_new_session=True,
        )
        self.started = time.time()

    def outlives(self, seconds: float, *, training: bool = False) -> bool:
        """Whether it is there after that many seconds, of training where that is asked for, or hangs before."""
        while self.process.poll() is None:
            since = self.trains_since() if training else self.started
            if time.time() - self.started > LONGEST_S or (since is not None and time.time() - since > seconds):
                return True
            time.sleep(0.1)
        return False

    def trains_since(self) -> float | None:
        """When its first step ended."""
        return next((event.end for event in self._steps()), None)

    def said(self) -> str:
        """Return the end of the output of all attempts."""
        return (self.directory.parents[1] / "output.txt").read_text()[-3000:]

    def kill(self, what: str) -> str | None:
        """SIGKILL to a part of it; what it was doing, None where that part is not there."""
        doing = self._doing()
        if what == "controller":
            self.process.kill()
        elif what == "process group":
            os.killpg(self.process.pid, signal.SIGKILL)
        else:
            log = str(self.directory / "logs" / LOGS[what])
            found = [process for process in psutil.Process(self.process.pid).children(True) if _output(process) == log]
            if not found:
                return None
            min(found, key=psutil.Process.create_time).kill()
        return doing

    def _doing(self) -> str:
        """Return the phase of the last events."""
        if (self.directory / DIRECTORY).is_dir() and any((self.directory / DIRECTORY).glob(".step-*")):
            return "save"
        steps = self._steps()
        done = steps[-1].ids["step"] if steps else None
        return "start-up" if done is None else f"step {done + 1}" if done < STEPS else "end"

    def _steps(self) -> list[Event]:
        """Its events of the phases of steps that have ended."""
        return [event for event in read_events(self.directory) if event.start > self.started and "step" in event.ids]


def _output(process: psutil.Process) -> str | None:
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1")
    except OSError:
        return None


def soak(seed: int, kills: int, deadline: float, tell: Callable[[dict[str, Any]], None]) -> None:
    """Execute one run with up to `kills` kills; `tell` receives the progress."""
    rng, done, began = random.Random(seed), list[dict[str, Any]](), time.time()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        while True:
            attempt, training = Attempt(folder, seed), rng.random() < 0.6
            wanted = len(done) < kills and time.time() < deadline
            limit_s = rng.uniform(0, TRAINING_S) if training else rng.uniform(2, STARTING_S)
            if not attempt.outlives(limit_s if wanted else LONGEST_S, training=wanted and training):
                break
            if time.time() - attempt.started > LONGEST_S:
                attempt.kill("controller")
                raise SystemExit(f"seed {seed}: an attempt hangs\n{attempt.said()}")
            what = rng.choice(["controller", "process group", "trainer rank", "server"])
            killed, doing = time.time(), attempt.kill(what) or attempt.kill(what := "controller")
            if attempt.outlives(300 + killed - attempt.started):
                raise SystemExit(f"seed {seed}: it outlives the death of its {what}\n{attempt.said()}")
            ended = time.time()
            done.append({"what": what, "during": doing, "seconds_lost": _lost(attempt, killed)})
            done[-1]["seconds_to_end"] = round(ended - killed, 1)
            print(f"seed {seed}, kill {len(done)}: {done[-1]}", flush=True)
            tell({"seed": seed, "kills": done})
        if attempt.process.returncode != 0:
            raise SystemExit(f"seed {seed} failed\n{attempt.said()}")
        seconds = time.time() - began
        tell({"seed": seed, "kills": done, "seconds": round(seconds, 1), **_verdict(attempt.directory)})


def _lost(attempt: Attempt, killed: float) -> float:
    """Seconds since the last complete checkpoint, or since the attempt began; 0 where one was completed after that."""
    found, _ = newest(attempt.directory / DIRECTORY)
    since = max(attempt.started, (found.path / "manifest.json").stat().st_mtime if found else 0.0)
    return round(max(0.0, killed - since), 1)


def _verdict(directory: Path) -> dict[str, Any]:
    file = directory / DIRECTORY / JOURNAL
    steps = Journal(file, read_header(file)["data"]).steps()
    groups = [group for step in steps for group in step.groups]
    if [step.version for step in steps] != list(range(1, STEPS + 1)) or sorted(groups) != list(range(STEPS * BATCH)):
        raise SystemExit(f"not every group was trained in exactly one step: {steps}")
    lines = read_rows(directory / METRICS_FILE, dict[str, int | float | None])
    rows = [row for row in lines if "seconds/step" in row]
    recorded, evaluated = ([row["step"] for row in lines if tag in row] for tag in ("seconds/step", "reward/held_out"))
    if recorded != list(range(1, STEPS + 1)) or evaluated != recorded[EVALUATES - 1 :: EVALUATES]:
        raise SystemExit(f"the record is not that of one run: steps {recorded}, evaluated {evaluated}")
    trained = sum(row["seconds/step"] for row in rows)
    rates = [row["train/lr"] for row in rows]
    falls = [before - after for before, after in pairwise(rates)]
    if max(falls) - min(falls) > 0.01 * max(falls):
        raise SystemExit(f"the learning rate does not fall evenly: {rates}")
    return {
        "groups": len(groups),
        "farthest_from_its_place": max(abs(place - group) for place, group in enumerate(groups)),
        "seconds_in_committed_steps": round(trained, 1),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=5, help="of each seed")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no further kill is made")
    arguments = parser.parse_args()
    deadline, runs = time.time() + 60 * arguments.minutes, dict[int, dict[str, Any]]()

    def tell(run: dict[str, Any]) -> None:
        runs[run["seed"]] = run
        RESULT.write_text(json.dumps(_summary(list(runs.values())), indent=1) + "\n")

    for seed in range(1, arguments.seeds + 1):
        if time.time() < deadline:
            soak(seed, arguments.kills, deadline, tell)


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    kills = [kill for run in runs for kill in run["kills"]]
    whole = [run for run in runs if "seconds" in run]
    seconds, trained = (sum(run[key] for run in whole) for key in ("seconds", "seconds_in_committed_steps"))
    return {
        "kills": len(kills),
        "runs_to_their_end": len(whole),
        "mean_seconds_lost": round(mean(kill["seconds_lost"] for kill in kills), 1) if kills else None,
        "share_of_time_in_committed_steps": round(trained / seconds, 3) if whole else None,
        "cores": os.cpu_count(),
        "runs": runs,
    }


if __name__ == "__main__":
    main()
