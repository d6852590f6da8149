"""Kill a run at random moments until it is done, one seed after another: what was lost, was anything trained twice?

    python benchmarks/soak.py [--seeds 5] [--kills 5] [--minutes 60]

A tiny run on the CPU with `recover.mode=fault`. After a random time one of its processes, or all of them, get SIGKILL;
then the same command goes on. At the end of each seed the journal has to name every group once. Lost work of a kill is
the time from the last complete checkpoint to the kill; the share of time that trained is the sum of the committed
steps' seconds over all seconds. Writes benchmarks/results/soak_cpu.json after every seed.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from areal_like.checkpoint.journal import Journal, read_header
from areal_like.checkpoint.store import DIRECTORY, JOURNAL, newest
from areal_like.metrics.lines import read_lines

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/soak_cpu.json"
SCRIPT, CONFIG = ROOT / "examples/math/gsm8k_rl.py", ROOT / "examples/math/gsm8k_grpo_cpu.yaml"
STEPS, BATCH = 40, 2
SETTINGS = (
    *("experiment_name=soak", "trial_name=run", "recover.mode=fault", "recover.freq_steps=2", "saver.freq_steps=7"),
    *(f"total_train_steps={STEPS}", f"train_dataset.batch_size={BATCH}", "gconfig.n_samples=2", "warm_start=null"),
    *("evaluator.freq_steps=5", "evaluator.at_start=false", "valid_dataset.arithmetic.size=16"),
    *("actor.init_model.num_hidden_layers=1", "actor.init_model.hidden_size=64"),
    *("train_dataset.arithmetic.size=64", "scheduler.startup_timeout_s=600", "rollout.startup_timeout_s=600"),
)
LOGS = {"trainer rank": "actor-1.log", "server": "server-0.log"}
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

    def wait(self, seconds: float) -> bool:
        """Whether it ended by itself before that."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

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
        """The phase that the last events tell of."""
        if (self.directory / DIRECTORY).is_dir() and any((self.directory / DIRECTORY).glob(".step-*")):
            return "save"
        events = read_lines(self.directory / "events.jsonl") if self.directory.exists() else []
        steps = [event for event in events if event["start"] > self.started and event["ids"].get("step")]
        return "training" if steps else "start-up"


def _output(process: psutil.Process) -> str | None:
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1")
    except OSError:
        return None


def soak(seed: int, kills: int, deadline: float) -> dict[str, Any]:
    """One run with up to `kills` kills, to its end."""
    rng, done, began = random.Random(seed), [], time.time()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        while True:
            attempt = Attempt(folder, seed)
            wanted = len(done) < kills and time.time() < deadline
            if attempt.wait(rng.uniform(5, 90) if wanted else LONGEST_S):
                break
            what = rng.choice(["controller", "process group", "trainer rank", "server"])
            if not wanted:
                attempt.kill("controller")
                raise SystemExit(f"seed {seed}: an attempt hangs\n{(folder / 'output.txt').read_text()[-3000:]}")
            killed, doing = time.time(), attempt.kill(what)
            if not attempt.wait(300):
                raise SystemExit(f"seed {seed}: it outlives the death of its {what}")
            if doing is not None:
                done.append({"what": what, "during": doing, "seconds_lost": _lost(attempt, killed)})
                print(f"seed {seed}, kill {len(done)}: {done[-1]}", flush=True)
        if attempt.process.returncode != 0:
            raise SystemExit(f"seed {seed} failed\n{(folder / 'output.txt').read_text()[-3000:]}")
        seconds = time.time() - began
        return {"seed": seed, "kills": done, "seconds": round(seconds, 1), **_verdict(attempt.directory, seconds)}


def _lost(attempt: Attempt, killed: float) -> float:
    """Seconds since the last complete checkpoint, or since the attempt began."""
    found, _ = newest(attempt.directory / DIRECTORY)
    since = max(attempt.started, (found.path / "manifest.json").stat().st_mtime if found else 0.0)
    return round(killed - since, 1)


def _verdict(directory: Path, seconds: float) -> dict[str, Any]:
    file = directory / DIRECTORY / JOURNAL
    steps = Journal(file, read_header(file)["data"]).steps()
    groups = [group for step in steps for group in step.groups]
    if [step.version for step in steps] != list(range(1, STEPS + 1)) or sorted(groups) != list(range(STEPS * BATCH)):
        raise SystemExit(f"not every group was trained in exactly one step: {steps}")
    rows = [row for row in read_lines(directory / "metrics.jsonl") if "seconds/step" in row]
    if [row["step"] for row in rows] != list(range(1, STEPS + 1)):
        raise SystemExit(f"the record is not that of one run: steps {[row['step'] for row in rows]}")
    trained = sum(row["seconds/step"] for row in rows)
    rates = [row["train/lr"] for row in rows]
    falls = {round(before - after, 9) for before, after in pairwise(rates)}
    return {
        "groups": len(groups),
        "farthest_from_its_place": max(abs(place - group) for place, group in enumerate(groups)),
        "learning_rate_falls_evenly": len(falls) == 1,
        "share_of_time_in_committed_steps": round(trained / seconds, 3),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=5, help="of each seed")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no further kill is made")
    arguments = parser.parse_args()
    deadline, runs = time.time() + 60 * arguments.minutes, []
    for seed in range(1, arguments.seeds + 1):
        if time.time() > deadline:
            break
        runs.append(soak(seed, arguments.kills, deadline))
        kills = [kill for run in runs for kill in run["kills"]]
        lost = [kill["seconds_lost"] for kill in kills]
        summary = {"kills": len(kills), "mean_seconds_lost": round(sum(lost) / max(1, len(lost)), 1)}
        RESULT.write_text(json.dumps({**summary, "cores": os.cpu_count(), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
