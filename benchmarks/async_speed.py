"""Measure samples per second of asynchronous runs relative to the best synchronous run on the same GPUs.

    python -m benchmarks.async_speed --gpus 2
    python -m benchmarks.async_speed --gpus 2 --arms turns --out async_speed.json

Every arm is a run through the launcher on the same prompts with the same response lengths. Arms run one after the
other; `--out` is written after each, and keeps the arms of an earlier call with the same work. Lengths are forced
(`forced_lengths.py`), so weights are random:
- `long_tailed`: log-normal with `--sigma`, and mean `--mean` before they are cut at `--longest`;
- `equal`: all lengths are the mean of the others.
Arms:
- `sync`: both engines on all GPUs, η = 0;
- `split`: `--servers` GPUs for servers and the others for the trainer, weights over NCCL, η = `--staleness`;
- `shared`: both engines colocated on all GPUs, weights over CUDA IPC, η = `--staleness`;
- `turns`: as `shared`, but time-shared (`rollout.sharing=alternate`).

The first steps of a run fill its queue and warm it up; they are recorded but not counted. The same holds for steps
after a change of the kind of lengths. A run is interrupted after its last counted step.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
import yaml

from areal_like.core.config.schema import InitModelConfig
from areal_like.demo.init_model import write_init_model
from benchmarks.report import ROOT, circumstances

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2},
    "0.6B": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
    },
    "4B": {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
    },
}
SHARE = {"tiny": 0.4, "0.6B": 0.6, "4B": 0.4}  # of a GPU that servers have where the trainer needs the rest
PROMPT = 96  # bytes, which are tokens here
DISTRIBUTIONS = ("long_tailed", "equal")
POLL_S = 0.5


def main(
    out: Annotated[Path, typer.Option(help="where the figures go")] = Path("async_speed.json"),
    gpus: int = 2,
    servers: Annotated[int | None, typer.Option(help="GPUs of servers in arm split; by default half of them")] = None,
    shape: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "0.6B",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    arms: Annotated[str, typer.Option(help="some of sync,split,shared,turns")] = "sync,split,shared",
    lengths: Annotated[str, typer.Option(help="some of long_tailed,equal")] = "long_tailed,equal",
    staleness: Annotated[int, typer.Option(help="η of asynchronous arms")] = 2,
    prompts: Annotated[int, typer.Option(help="prompts of a step")] = 64,
    samples: Annotated[int, typer.Option(help="responses to each")] = 8,
    mean: int = 1024,
    sigma: float = 1.0,
    longest: int = 8192,
    steps: Annotated[int, typer.Option(help="steps that count, of each kind of lengths")] = 4,
    sync_steps: Annotated[int, typer.Option(help="the same, of the synchronous arm, whose steps are alike")] = 2,
    limit_s: Annotated[float, typer.Option(help="longest time of one arm, in seconds")] = 550.0,
    folder: Annotated[Path, typer.Option(help="where runs and their logs lie")] = Path("/tmp/async_speed"),
    override: Annotated[list[str] | None, typer.Option(help="key=value, for every arm")] = None,
) -> None:
    work = {
        "gpus": gpus,
        "shape": shape,
        "device": device,
        "prompts": prompts,
        "samples": samples,
        "response_tokens": {"distribution": "log-normal, cut", "mean": mean, "sigma": sigma, "longest": longest},
        "overrides": override or [],
    }
    figures = json.loads(out.read_text()) if out.exists() else {}
    kept = figures["arms"] if figures.get("work") == work else {}
    folder.mkdir(parents=True, exist_ok=True)
    model = made_model(folder, shape, device, PROMPT + longest)
    kinds = [name for name in DISTRIBUTIONS if name in lengths.split(",")]
    for arm in arms.split(","):
        eta, count = (0, sync_steps) if arm == "sync" else (staleness, steps)
        plan = Plan(kinds, eta, count)
        rows = folder / f"rows-{arm}.jsonl"
        write_rows(rows, plan, work)
        config = arm_config(arm, work, model, rows, eta, servers or gpus // 2 or 1)
        kept[arm] = run_arm(arm, config, plan, work, folder, limit_s)
        report = {**circumstances(), "work": work, **summary(kept), "arms": kept}
        out.write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps({"arm": arm, "samples_per_s": kept[arm]["samples_per_s"], **summary(kept)}), flush=True)


class Plan:
    """Which steps of an arm have which lengths, and which of them count."""

    def __init__(self, kinds: list[str], staleness: int, count: int) -> None:
        self.kind: list[str] = []  # of the prompts of each step, from the first
        self.counted: dict[str, range] = {}  # steps from 1 on
        for name in kinds:
            begin = len(self.kind) + 1 + staleness  # whatever a step trains on was begun up to η steps before
            self.counted[name] = range(begin + 1, begin + 1 + count)
            self.kind += [name] * (begin + count - len(self.kind))
        self.steps = len(self.kind)
        self.kind += self.kind[-1:] * (staleness + 1)  # servers have to do until the last step that counts


def made_model(folder: Path, shape: str, device: str, positions: int) -> Path:
    """A checkpoint with random weights, made once for all arms."""
    model = folder / f"model-{shape}"
    if not model.exists():
        init = InitModelConfig(tokenizer="bytes", **SHAPES[shape], max_position_embeddings=max(positions + 64, 40960))
        part = folder / f"model-{shape}.part"
        shutil.rmtree(part, ignore_errors=True)
        write_init_model(init, part, seed=0, dtype="float32" if device == "cpu" else "bfloat16")
        part.rename(model)
    return model


def write_rows(file: Path, plan: Plan, work: dict[str, Any]) -> None:
    """The prompts of all steps in order, each with the lengths of its responses; the same for every arm."""
    law = work["response_tokens"]
    mu = np.log(law["mean"]) - law["sigma"] ** 2 / 2
    streams = {name: np.random.default_rng(place) for place, name in enumerate(DISTRIBUTIONS)}
    many = np.random.default_rng(99).lognormal(mu, law["sigma"], 100_000).clip(1, law["longest"])
    with file.open("w") as rows:
        for kind in plan.kind:
            rng = streams[kind]
            for _ in range(work["prompts"]):
                lengths = rng.lognormal(mu, law["sigma"], work["samples"]).clip(1, law["longest"]).astype(int)
                if kind == "equal":
                    lengths[:] = many.mean()
                text = "".join(map(chr, rng.integers(97, 123, PROMPT - 8)))
                rows.write(json.dumps({"question": text, "answer": "0", "lengths": lengths.tolist()}) + "\n")


def arm_config(arm: str, work: dict[str, Any], model: Path, rows: Path, staleness: int, servers: int) -> dict[str, Any]:
    """The run's YAML."""
    gpus, cpu, longest = work["gpus"], work["device"] == "cpu", work["response_tokens"]["longest"]
    layout = f"sglang:d{gpus}|megatron:d{gpus}"
    if arm == "split":
        layout = f"sglang:d{servers}+megatron:d{gpus - servers}"
    alone = arm in ("split", "turns")
    big = work["shape"] == "4B"
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return forced_run(work, rows, model.parent / "runs", gpus) | {
        "experiment_name": "async-speed",
        "trial_name": f"{arm}-{time.strftime('%H%M%S')}",
        "device": work["device"],
        "allocation_mode": layout,
        "actor": {
            "path": str(model),
            "dtype": "float32" if cpu else "bfloat16",
            "mb_spec": {"max_tokens_per_mb": max(16384, PROMPT + longest)},
            "optimizer": {"lr": 1e-6},
            "megatron": recompute if big else {},
        },
        "rollout": {
            "max_head_offpolicyness": staleness,
            "sharing": "alternate" if arm == "turns" else "resident",
            "max_logprob_diff": 1.0,
        },
        "sglang": {
            "mem_fraction_static": 0.85 if alone else SHARE[work["shape"]],
            "attention_backend": None if cpu else "triton",
            "extra_args": {} if cpu else {"disable_prefill_cuda_graph": True},
        },
        "weight_update": {"mode": "collective" if arm == "split" else "ipc"},
    }


def forced_run(work: Mapping[str, Any], rows: Path, runs: Path, gpus: int) -> dict[str, Any]:
    """Return the keys of a run without an end, whose rows force the lengths of responses."""
    return {
        "total_train_steps": 10_000,
        "total_train_epochs": 10_000,
        "cluster": {"n_gpus_per_node": gpus, "fileroot": str(runs)},
        "train_dataset": {
            "path": str(rows),
            "shuffle": False,
            "batch_size": work["prompts"],
            "max_prompt_length": PROMPT,
        },
        "gconfig": {"n_samples": work["samples"], "max_new_tokens": work["response_tokens"]["longest"]},
        "workflow": f"{ROOT / 'benchmarks/forced_lengths.py'}:run",
        "episode": {"timeout_s": 3600.0},
        "reward": {"workers": 1},
        "stats_logger": {"samples": 0, "tensorboard": False, "report": False},
    }


def run_arm(
    arm: str, config: dict[str, Any], plan: Plan, work: dict[str, Any], folder: Path, limit_s: float
) -> dict[str, Any]:
    """Run until the last step that counts; its figures, as far as they came."""
    file, log = folder / f"{arm}.yaml", folder / f"{arm}.log"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    command = [sys.executable, str(ROOT / "examples/math/gsm8k_rl.py"), "--config", str(file), *work["overrides"]]
    metrics = Path(config["cluster"]["fileroot"]) / config["experiment_name"] / config["trial_name"] / "metrics.jsonl"
    begun, steps = time.monotonic(), dict[int, dict[str, float]]()
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        first_s = None
        while process.poll() is None and max(steps, default=0) < plan.steps and time.monotonic() - begun < limit_s:
            time.sleep(POLL_S)
            steps = read_steps(metrics)
            if steps and first_s is None:
                first_s = time.monotonic() - begun
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
    result: dict[str, Any] = {
        "layout": config["allocation_mode"],
        "staleness": config["rollout"]["max_head_offpolicyness"],
        "sharing": config["rollout"]["sharing"],
        "seconds_to_first_step": first_s,
        "counted_steps": {name: [each.start, each.stop - 1] for name, each in plan.counted.items()},
        "samples_per_s": {name: rate(steps, each, work) for name, each in plan.counted.items()},
        "steps": [{"step": number, **shown(step)} for number, step in sorted(steps.items())],
    }
    if max(steps, default=0) < plan.steps:
        result["cut_short"] = log.read_text(errors="replace")[-3000:]
        print(f"{arm} was cut short:\n{result['cut_short']}", flush=True)
    return result


def read_steps(metrics: Path) -> dict[int, dict[str, float]]:
    """The numbers of each training step so far."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    found = (json.loads(line) for line in lines if line.endswith("}"))
    return {each["step"]: each for each in found if "seconds/step" in each}


def shown(step: dict[str, float]) -> dict[str, float]:
    groups = ("seconds/", "idle/", "throughput/", "staleness/", "rollout/response_length")
    return {name: round(value, 4) for name, value in step.items() if name.startswith(groups)}


def rate(steps: dict[int, dict[str, float]], counted: range, work: dict[str, Any]) -> float | None:
    """Samples per second of the steps that count and have been made."""
    seconds = [steps[number]["seconds/step"] for number in counted if number in steps]
    return len(seconds) * work["prompts"] * work["samples"] / sum(seconds) if seconds else None


def summary(arms: dict[str, Any]) -> dict[str, Any]:
    """The best asynchronous arm and its ratio to the synchronous one, for each kind of lengths."""
    ratios: dict[str, Any] = {}
    for kind in DISTRIBUTIONS:
        rates = {arm: result["samples_per_s"].get(kind) for arm, result in arms.items()}
        others = {arm: value for arm, value in rates.items() if arm != "sync" and value}
        if others and (sync := rates.get("sync")):
            best = max(others, key=lambda arm: others[arm])
            ratios[kind] = {"ratio": others[best] / sync, "best": best, "samples_per_s": rates}
    return {"ratio": ratios}


if __name__ == "__main__":
    typer.run(main)
