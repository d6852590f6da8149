"""Compare the seconds to an evaluation reward: this engine's demo and TRL's GRPOTrainer on the same machine.

    python -m benchmarks.demo_vs_trl --seeds 1,2,3 [--target 0.9] [--limit-s 900] actor.optimizer.warmup_steps=10
    python -m benchmarks.demo_vs_trl --config examples/math/gsm8k_smollm2.yaml --name gsm8k_vs_trl --target 0.08

Both start from one checkpoint, which a run of one step with a negligible learning rate writes after its warm start.
Both use the same problems, reward, batch, samples, learning rate, clipping, temperature and response length. Both
evaluate on the same evaluation prompts at `evaluator.temperature` after every `evaluator.freq_steps` steps, and end
at the target.

- `total` is the time from the start of the process, including imports and servers. `training` is the time from the
  evaluation before the first step, when both are ready. Both times include evaluations.
- The processes of this engine have one thread each. TRL uses the number of threads in `--trl-threads` with the fastest
  first steps. On two cores, compare with one trainer rank beside the server: `actor.backend=megatron:d1`.
- The learning rate warms up because both start with a new optimizer; the demo itself keeps that of its warm start.
- TRL trains responses with advantage 0 like all others; this engine skips them (`actor.skip_zero_advantages`). TRL
  computes a prompt with each of its responses; this engine computes it once (`actor.mb_spec.share_prompts`). The
  gradients are the same.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from areal_like.core.config.load import dump, load
from benchmarks.report import ROOT, save

SCRIPT = ROOT / "examples/math/gsm8k_rl.py"
CONFIG = ROOT / "examples/math/gsm8k_grpo_cpu.yaml"
type Event = dict[str, float]  # step, reward, time


def main(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value ...")] = None,
    seeds: str = "1",
    target: float = 0.9,
    limit_s: float = 900,
    trl_threads: str = "1,2,4",
    trl_packages: Path = ROOT / ".trl",
    config: Annotated[Path, typer.Option(help="the run; on a GPU TRL has one process")] = CONFIG,
    name: Annotated[str, typer.Option(help="of the result file")] = "demo_vs_trl",
) -> None:
    if not (trl_packages / "trl").is_dir():
        raise typer.BadParameter(f"{trl_packages} holds no TRL; benchmarks/requirements-trl.txt says how to install it")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # both read compiled modules, as every run but the first does
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            compare(
                Path(folder) / seed,
                [*(overrides or []), f"seed={seed}"],
                target,
                limit_s,
                trl_threads,
                trl_packages,
                config,
            )
            for seed in seeds.split(",")
        ]
    figures = {
        "target": target,
        "limit_s": limit_s,
        "trl": {item.name: item.version for item in metadata.distributions(path=[str(trl_packages)])},
        "ratio": {kind: median(runs, kind) for kind in ("total", "training")},
        "seeds": dict(zip(seeds.split(","), runs, strict=True)),
    }
    print("times faster than TRL (median of the seeds):", figures["ratio"])
    save(name, figures)


def compare(
    folder: Path,
    overrides: Sequence[str],
    target: float,
    limit_s: float,
    threads: str,
    packages: Path,
    example: Path = CONFIG,
) -> dict:
    """Warm-start once, then both; every time is in seconds, None where the target was not reached."""
    still = ["total_train_steps=1", "actor.optimizer.lr=1e-12", "actor.optimizer.warmup_steps=0"]
    warm = engine(folder / "warm", [*overrides, *still], math.inf, limit_s, example)
    start = [
        *overrides,
        f"actor.path={folder / 'warm/run/checkpoints/step-1'}",
        f"tokenizer_path={folder / 'warm/run/checkpoints/step-1'}",
        "warm_start=null",
    ]
    sides = {"engine": engine(folder / "engine", start, target, limit_s, example)}
    config = folder / "engine/run/config.yaml"
    step_s = trl_step_seconds(folder, config, [int(n) for n in threads.split(",")], packages)
    fastest = min(step_s, key=lambda n: step_s[n]) if step_s else int(threads)
    sides["trl"] = trl(folder / "trl.jsonl", config, target, limit_s, fastest, packages)
    result: dict = {
        "reward_after_warm_start": warm["events"][0]["reward"],
        "trl_seconds_per_step_by_threads": step_s,
        "trl_threads": fastest,
    }
    for name, side in sides.items():
        reached = next((event["time"] for event in side["events"] if event["reward"] >= target), None)
        ready = side["events"][0]["time"]
        result[name] = {
            "total_s": reached and reached - side["started"],
            "training_s": reached and reached - ready,
            "start_up_s": ready - side["started"],
            "steps": side["events"][-1]["step"],
            "held_out": [{**event, "time": event["time"] - side["started"]} for event in side["events"]],
        }
        print(name, {key: value for key, value in result[name].items() if key != "held_out"}, flush=True)
    result["ratio"] = {
        kind: ours and theirs and theirs / ours
        for kind in ("total", "training")
        for ours, theirs in [(result["engine"][f"{kind}_s"], result["trl"][f"{kind}_s"])]
    }
    return result


def engine(folder: Path, overrides: Sequence[str], target: float, limit_s: float, example: Path = CONFIG) -> dict:
    """Run the example to the target or the limit; its evaluations with the wall time at which each was written."""
    where = [f"cluster.fileroot={folder.parent}", f"experiment_name={folder.name}", "trial_name=run"]
    command = [sys.executable, str(SCRIPT), "--config", str(example), *where, *overrides]
    started = time.time()
    process = subprocess.Popen(command, cwd=ROOT)
    while process.poll() is None and time.time() - started < limit_s and best(folder / "run/metrics.jsonl") < target:
        time.sleep(1)
    if process.poll() is None:
        process.terminate()  # it ends all of its own
    if process.wait() not in (0, 143, -signal.SIGTERM):  # the last where it was about to end by itself
        raise SystemExit(f"the run failed with exit code {process.returncode}")
    board = EventAccumulator(str(folder / "run/tensorboard")).Reload()
    events = [{"step": e.step, "reward": e.value, "time": e.wall_time} for e in board.Scalars("reward/held_out")]
    return {"started": started, "events": events}


def best(metrics: Path) -> float:
    """Return the highest evaluation reward so far."""
    lines = metrics.read_bytes().splitlines() if metrics.exists() else []
    return max((json.loads(line).get("reward/held_out", 0.0) for line in lines if line.endswith(b"}")), default=0.0)


def trl_step_seconds(folder: Path, config: Path, threads: Sequence[int], packages: Path) -> dict[int, float]:
    """Seconds per step of TRL with each number of threads, from its second to its fourth step."""
    short = folder / "short.yaml"
    short.write_text(dump(load(config, ["total_train_steps=4", "evaluator.freq_steps=1"]).config))
    seconds = dict[int, float]()
    for n in threads if len(threads) > 1 else ():
        events = trl(folder / f"threads-{n}.jsonl", short, math.inf, 300, n, packages)["events"]
        seconds[n] = (events[4]["time"] - events[2]["time"]) / 2
    return seconds


def trl(events: Path, config: Path, target: float, limit_s: float, threads: int, packages: Path) -> dict:
    """Run TRL; it stops by itself at the target or the limit."""
    started = time.time()
    subprocess.run(
        [sys.executable, "-m", "benchmarks.trl_grpo", str(config), str(events), str(target), str(limit_s)],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{packages}",
            "OMP_NUM_THREADS": str(threads),
        },
        check=True,
    )
    return {"started": started, "events": [json.loads(line) for line in events.read_text().splitlines()]}


def median(runs: Sequence[dict], kind: str) -> float | None:
    """Of the seeds' ratios; who missed the target within the limit or the run's steps was slower without bound."""
    missed = {True: 0.0, False: math.inf}  # by whether this engine did
    ratios = [run["ratio"][kind] or missed[run["engine"][f"{kind}_s"] is None] for run in runs]
    middle = statistics.median(ratios)
    return middle if math.isfinite(middle) else None


if __name__ == "__main__":
    typer.run(main)
