"""Compare distillation with GRPO on a CPU: tokens that a small student generates until its evaluation reward is 0.9.

    python -m benchmarks.distill [--seeds 1,2] [--target 0.9] [--limit-s 900] [--teacher DIRECTORY]

Without --teacher the CPU demo trains one first. GRPO has groups of 8 samples, as in the CPU demo, and is run with the
demo's two mini-batches and with as many as distillation has. All runs have the same student, number of steps and
evaluations. Tokens are those of the ledger without evaluations (`tokens/generated` minus `tokens/evaluated`). Figures
go to the result file after each run.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.demo import CONFIG, SCRIPT
from benchmarks.report import ROOT, save

STUDENT = ROOT / "examples/distill/student_cpu.yaml"
TEACHER_STEPS = "total_train_steps=50"  # it solves nearly all sums then
SHARED = ("total_train_steps=60", "evaluator.freq_steps=2")
GRPO = ("algorithm=grpo", "teacher=null", "gconfig.n_samples=8", "actor.skip_zero_advantages=true")
ALGORITHMS = {
    "distill": (),
    "grpo": (*GRPO, "actor.ppo_n_minibatches=2"),
    "grpo, 8 mini-batches": GRPO,
}


def main(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value ...")] = None,
    seeds: str = "1",
    target: float = 0.9,
    limit_s: float = 900,
    teacher: Path | None = None,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        given = teacher or train(folder, "teacher", CONFIG, [TEACHER_STEPS], limit_s) / "checkpoints/step-50"
        runs = {}
        for seed, (number, (name, settings)) in itertools.product(seeds.split(","), enumerate(ALGORITHMS.items())):
            own = [*([f"teacher.path={given}"] if name == "distill" else []), *SHARED, *settings, f"seed={seed}"]
            directory = train(folder, f"student-{number}-{seed}", STUDENT, [*own, *(overrides or [])], limit_s)
            runs[f"{name}, seed {seed}"] = {"settings": settings, **figures(directory, target)}
            print(name, seed, runs[f"{name}, seed {seed}"], flush=True)
            save("distill_cpu", {"target": target, "settings": SHARED, "runs": runs})


def train(folder: str, name: str, config: Path, settings: list[str], limit_s: float) -> Path:
    """Return the directory of a run, which is ended after `limit_s`; what it has evaluated until then counts."""
    where = [f"cluster.fileroot={folder}", "experiment_name=distill", f"trial_name={name}"]
    process = subprocess.Popen([sys.executable, str(SCRIPT), "--config", str(config), *where, *settings], cwd=ROOT)
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
    if process.returncode not in (0, 143):
        raise SystemExit(f"the run {name} failed with exit code {process.returncode}")
    return Path(folder) / "distill" / name


def figures(directory: Path, target: float) -> dict[str, Any]:
    """Return figures from the run's metrics; tokens and steps to the target are None if it was not reached."""
    tokens, held_out = {0: 0.0}, dict[int, float]()
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if "tokens/generated" in entry:
            tokens[entry["step"]] = entry["tokens/generated"] - entry["tokens/evaluated"]
        if "reward/held_out" in entry:
            held_out[entry["step"]] = entry["reward/held_out"]
    reached = next((step for step, reward in held_out.items() if reward >= target), None)
    return {
        "steps_to_target": reached,
        "tokens_to_target": None if reached is None else tokens[reached],
        "final_reward": [*held_out.values()][-1],
        "held_out": [[step, round(reward, 4)] for step, reward in held_out.items()],
    }


if __name__ == "__main__":
    typer.run(main)
