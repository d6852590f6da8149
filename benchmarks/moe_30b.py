"""Run a whole asynchronous loop of Qwen3-30B-A3B's shape on four GPUs, and report it beside its predictions.

    benchmarks/moe_30b.sh [key=value ...]
    python -m benchmarks.moe_30b --tiny --gpus 2 device=cpu ...     # a small shape, to try the script

Weights are random and made by the trainer's ranks (`made_weights.py`); lengths are forced (`forced_lengths.py`), from a
log-normal distribution. Arms are run one after the other, each until its last counted step:
- `split`: one GPU serves, three train in a pipeline, and weights go over NCCL;
- `shared`: all four train with attention in `d4` and experts in `e4`, and a server of four GPUs lies on the same.
The optimizer keeps 16 bits of each value, so that 30B parameters fit on three GPUs.

Figures of an arm: tokens per second and GPU (prompts and responses of the trained samples), seconds of each phase, the
pause of the weight update, peak memory of the trainer's GPUs beside `allocation memory`, and seconds of training beside
the planner's.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer
import yaml

from areal_like.core.config.load import load
from areal_like.core.config.schema import InitModelConfig
from areal_like.demo.init_model import model_config, write_init_model
from areal_like.preflight import model as of_model
from areal_like.preflight import preflight
from benchmarks.async_speed import PROMPT, Plan, forced_run, read_steps, run_arm, write_rows
from benchmarks.made_weights import MADE, environment
from benchmarks.report import save

SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
TINY = {**SHAPE, "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 16,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}  # fmt: skip
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SMALL_STATES = {
    "use_precision_aware_optimizer": True,
    **dict.fromkeys(("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), "bfloat16"),
}
ARMS: dict[str, dict[str, Any]] = {
    "split": {"layout": "sglang:d1+megatron:d1p3", "mode": "collective", "fraction": 0.85},
    "shared": {"layout": "sglang:d1t4|megatron:(attn:d4|ffn:e4)", "mode": "ipc", "fraction": 0.25},
}
PHASES = ("seconds/", "idle/", "throughput/", "mfu/", "rollout/logprob_diff")


def main(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value ...")] = None,
    arms: Annotated[str, typer.Option(help=", ".join(ARMS))] = "split",
    tiny: Annotated[bool, typer.Option(help="a small shape")] = False,
    prompts: int = 64,
    samples: int = 8,
    mean: int = 512,
    longest: int = 2048,
    steps: Annotated[int, typer.Option(help="steps that count")] = 4,
    limit_s: Annotated[float, typer.Option(help="longest time of one arm, in seconds")] = 560.0,
    folder: Path = Path("/tmp/moe_30b"),
    name: str = "moe_30b_h200x4",
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    law = {"mean": mean, "sigma": 1.0, "longest": longest}
    work = {"prompts": prompts, "samples": samples, "response_tokens": law, "overrides": overrides or []}
    directory = write_model(TINY if tiny else SHAPE, folder / "model")
    plan = Plan(["long_tailed"], 1, steps)
    write_rows(folder / "rows.jsonl", plan, work)
    found = {}
    for arm in arms.split(","):
        config = arm_config(arm, ARMS[arm], work, directory, folder)
        peaks = folder / f"peaks-{arm}"
        peaks.mkdir(exist_ok=True)
        with patch.dict(os.environ, environment(MADE) | {"PEAKS": str(peaks)}):
            result = run_arm(arm, config, plan, work, folder, limit_s)
        found[arm] = figures(config, plan, work, result, folder, peaks)
        print(json.dumps(found[arm]["summary"], indent=1), flush=True)
        save(name, {"shape": SHAPE, "work": work, "arms": found})


def write_model(shape: Mapping[str, Any], folder: Path) -> Path:
    """Write a tokenizer of bytes and config.json, without weights."""
    if not folder.exists():
        smallest = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
                    "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 16}  # fmt: skip
        write_init_model(InitModelConfig(tokenizer="bytes", **smallest), folder, seed=0, dtype="bfloat16")
        (folder / "model.safetensors").unlink()
    made = InitModelConfig(tokenizer="bytes", max_position_embeddings=40960, tie_word_embeddings=False, **shape)
    (folder / "config.json").write_text(json.dumps(model_config(made, "bfloat16")))
    return folder


def arm_config(
    arm: str, settings: Mapping[str, Any], work: Mapping[str, Any], model: Path, folder: Path
) -> dict[str, Any]:
    """Return the run's YAML."""
    start = {"use_dist_checkpointing": True, "dist_checkpointing_path": str(model)}
    return forced_run(work, folder / "rows.jsonl", folder / "runs", 4) | {
        "experiment_name": "moe-30b",
        "trial_name": arm,
        "device": "cuda",
        "allocation_mode": settings["layout"],
        "actor": {
            "path": str(model),
            "dtype": "bfloat16",
            "mb_spec": {"max_tokens_per_mb": 16384},
            "optimizer": {"lr": 1e-6},
            "megatron": {**start, **FULL, **SMALL_STATES},
        },
        "rollout": {"sharing": "resident", "max_head_offpolicyness": 1, "max_logprob_diff": 1.0},
        "sglang": {
            "mem_fraction_static": settings["fraction"],
            "attention_backend": "triton",
            "extra_args": {"disable_prefill_cuda_graph": True},
        },
        "weight_update": {"mode": settings["mode"], "timeout_s": 300.0},
    }


def figures(
    config: Mapping[str, Any],
    plan: Plan,
    work: Mapping[str, Any],
    result: Mapping[str, Any],
    folder: Path,
    peaks: Path,
) -> dict[str, Any]:
    """Return the figures of an arm beside its predictions."""
    file = folder / "runs" / config["experiment_name"] / config["trial_name"] / "metrics.jsonl"
    steps = read_steps(file)
    counted = [steps[number] for number in plan.counted["long_tailed"] if number in steps]
    names = sorted({name for step in counted for name in step if name.startswith(PHASES)})
    medians = {name: statistics.median(step.get(name, 0.0) for step in counted) for name in names}
    seconds = [step["seconds/step"] for step in counted]
    lengths = [step["rollout/response_length"] for step in counted]
    trained = work["prompts"] * work["samples"] * sum(PROMPT + length for length in lengths)
    rates = {"tokens_per_s_and_gpu": trained / sum(seconds) / 4 if counted else None, "steps": len(counted)}
    found = {each.stem: json.loads(each.read_text()) for each in sorted(peaks.glob("peak-*.json"))}
    foreseen = predicted(config, work, folder)
    measured = max((each["segments"] for each in found.values()), default=None)
    memory = {"trainer_bytes": measured, "predicted_bytes": foreseen.get("trainer_bytes")}
    time = {"training_s": medians.get("seconds/training"), "predicted_s": foreseen.get("training_s")}
    summary = {**rates, **memory, **time, "medians": medians}
    return {"summary": summary, "config": config, "peaks": found, "predicted": foreseen, "run": result}


def predicted(config: Mapping[str, Any], work: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the trainer's memory as `allocation memory` has it, and seconds of training as the planner has them."""
    from allocation.memory import footprint
    from allocation.planner.seconds import training_seconds
    from areal_like.preflight.layout import workloads
    from areal_like.preflight.step_time import _make_task, find_gpu

    file = folder / "predicted.yaml"
    file.write_text(yaml.safe_dump(dict(config)))
    with patch.object(of_model, "check_start", lambda view, spec: iter(())):
        job = preflight(load(file, list(work["overrides"])), dry_run=True).job
    if job is None or not (works := workloads(job.config, job.models)):
        return {}
    work_of, actor = works["actor"], job.plan.engine("actor")
    task = _make_task(job.config, work_of, find_gpu(work_of.memory.gpu_bytes or 0))
    parts = training_seconds(task, actor.sizes, work_of.megatron, work_of.tokens)
    peak = footprint(actor, work_of).peak
    return {
        "trainer_bytes": peak.bytes,
        "parts_of_memory": [asdict(item) for item in peak.items],
        "training_s": sum(parts.values()),
        "parts_of_training": parts,
        "said": job.step_time,
    }


if __name__ == "__main__":
    typer.run(main)
