"""Kill a run several times, and compute each of its steps again: how many have the same bits?

python -m benchmarks.replayed_steps --steps 100 --kills 5 --name NAME RUN COMMAND ...

COMMAND starts the run in the directory RUN, with recover.mode=auto and recover.replay=true, and resumes it after each
SIGKILL. The steps are replayed from the beginning in one pass, so a step that was trained after a resume has the same
bits only if loading its checkpoint changed none.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import subprocess
import time
from pathlib import Path

from areal_like.capabilities.replay.reader import open_run
from areal_like.capabilities.replay.verdicts import ask, verify
from areal_like.core.checkpoint.journal import count_steps
from benchmarks.report import save

POLL_S = 0.2
MOST_FAILURES = 3  # such as a start on a machine that is too busy


def run_with_kills(command: list[str], run: Path, steps: int, kills: int) -> tuple[list[int], int]:
    """Run to the last step; return the journal's steps at each SIGKILL, and how often the run failed by itself."""
    chance, done, failures = random.Random(0), list[int](), 0
    targets = [steps * (number + 1) // (kills + 1) for number in range(kills)]
    journal = run / "recover/journal.jsonl"
    while True:
        target = targets[len(done)] if len(done) < kills else None
        started = subprocess.Popen(command, start_new_session=True)
        while started.poll() is None and (target is None or not journal.exists() or count_steps(journal) < target):
            time.sleep(POLL_S)
        if target is not None and started.poll() is None:
            time.sleep(chance.random())
            os.kill(started.pid, signal.SIGKILL)
            started.wait()
            done.append(count_steps(journal))
            print(f"killed after step {done[-1]}", flush=True)
        elif started.wait() == 0 and target is None and count_steps(journal) == steps:
            return done, failures
        else:
            failures += 1
            print(f"exit code {started.returncode} at step {count_steps(journal)}", flush=True)
            if failures > MOST_FAILURES:
                raise SystemExit("the run fails by itself too often")


def measure_recording(run: Path) -> dict[str, float]:
    """Return the seconds of recording and of steps, and the bytes of a step's file; medians over the run."""
    metrics = open_run(run).metrics
    recording, step = (metrics[f"seconds/{name}"][1] for name in ("recording", "step"))
    sizes = [path.stat().st_size for path in (run / "recover/replay").glob("*.safetensors")]
    share = statistics.median(recording / step)
    return {
        "recording_s": round(statistics.median(recording), 5),
        "step_s": round(statistics.median(step), 4),
        "recording_share": round(share, 5),
        "file_bytes": int(statistics.median(sizes)),
    }


def main() -> None:
    """Run, replay, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--name", required=True, help="of the file in benchmarks/results")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    kills, failures = run_with_kills(options.command, options.run, options.steps, options.kills)
    asked = ask(options.run, 1, options.steps, (), lambda text: print(text, flush=True))
    verdict = asyncio.run(verify(asked))
    figures = {
        "steps": options.steps,
        "killed_after": kills,
        "failed_starts": failures,
        "equal": verdict.good,
        "verdict": verdict.text.replace(str(options.run), "RUN"),
        **measure_recording(options.run),
    }
    save(options.name, figures)


if __name__ == "__main__":
    main()
