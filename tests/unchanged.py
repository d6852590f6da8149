"""Dumps what a tree does, so that two trees can be compared before and after code moves.

    python tests/unchanged.py dump OUT.json        # in the root of either tree
    python tests/unchanged.py compare A.json B.json

Dumped are the resolved configuration of every shipped YAML, the findings of the checks for wrong configurations and for
every pair of features, the plan and memory of layouts, and log-probs, statistics and weights of three training steps of
twelve models in eight layouts.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

ROOT = Path.cwd()
BASE = "examples/math/gsm8k_grpo_cpu.yaml"
# Overrides that turn one feature on, by its name; every pair of them is checked.
FEATURES: dict[str, tuple[str, ...]] = {
    "fsdp": ("actor.backend=fsdp:d2",),
    "tensor-parallel": ("actor.backend=megatron:t2",),
    "pipeline": ("actor.backend=megatron:p2",),
    "context-parallel": ("actor.backend=megatron:c2",),
    "experts": ("actor.backend=megatron:(attn:d2|ffn:e2)", "actor.init_model.num_experts=4"),
    "shared-gpus": ("rollout.sharing=time",),
    "lora": ("actor.use_lora=true", "actor.lora_rank=8"),
    "adapters": ("adapters={one: {}, two: {}}", "actor.use_lora=true", "actor.lora_rank=8"),
    "teacher": ("teacher={path: /missing, backend: 'sglang:d1'}", "actor.teacher_coef=1.0"),
    "own-teacher": ("teacher={from_policy: true, hint_field: answer}", "algorithm=distill"),
    "critic": ("critic={}", "algorithm=ppo"),
    "reference": ("ref={}", "actor.kl_ctl=0.1"),
    "curriculum": ("train_dataset.curriculum={low: 0.1, high: 0.9}",),
    "sandbox": ("episode.sandbox={backend: bubblewrap}", "workflow=a.module:Agent"),
    "tools": ("episode.mcp_servers={files: {command: [server]}}",),
    "masks": ("gconfig.top_p=0.9",),
    "top-k": ("gconfig.top_k=5",),
    "routes": ("rollout.router_replay=true",),
    "no-routes": ("rollout.router_replay=false",),
    "branches": ("rollout.branch={after: 2, width: 2}",),
    "oversampling": ("rollout.oversampling=1.5", "actor.dynamic_sampling=true"),
    "offload": ("actor.offload=true",),
    "deltas": ("weight_update.mode=disk_delta",),
    "disk": ("weight_update.mode=disk",),
    "ipc": ("weight_update.mode=ipc",),
    "checksums": ("weight_update.checksum=true",),
    "judge": ("reward.type=judge", "reward.judge={path: /missing}"),
    "reward-model": ("reward.type=model", "reward.model={path: /missing}"),
    "images": ("actor.init_model.vision_layers=2", "train_dataset.image_field=image"),
    "dpo": ("algorithm=dpo",),
    "gspo": ("algorithm=gspo",),
    "gpu": ("device=cuda",),
}
# Values that are wrong on their own.
WRONG = (
    "allocation_mode=sglang:d1+megatron:d0", "allocation_mode=vllm:d1|megatron:d1", "actor.backend=megatron:(attn:t2|ffn:e3)",
    "actor.backend=megatron:d2t", "rollout.backend=sglang:p2", "rollout.backend=megatron:d1", "cluster.n_gpus_per_node=0",
    "train_dataset.batch_size=0", "train_dataset.batch_size=-1", "train_dataset.path=/missing.jsonl", "gconfig.n_samples=1",
    "gconfig.n_samples=0", "gconfig.max_new_tokens=0", "gconfig.max_new_tokens=100000", "gconfig.temperature=0",
    "gconfig.temperature=-1", "gconfig.top_p=0", "gconfig.top_p=2", "gconfig.top_k=-2", "gconfig.stop_token_ids=[-1]",
    "gconfig.stop_token_ids=[100000]", "reward.type=gsm9k", "reward.function=missing.module:f", "reward.function=f",
    "reward.workers=0", "reward.timeout_s=0", "actor.dtype=float64", "actor.dtype=float16", "actor.optimizer.lr=-1",
    "actor.optimizer.type=adamw8", "actor.optimizer.warmup_steps=1000", "actor.ppo_n_minibatches=0",
    "actor.ppo_n_minibatches=1000", "actor.eps_clip=-0.1", "actor.eps_clip_higher=0.1", "actor.kl_ctl=0.1",
    "actor.kl_estimator=k9", "actor.importance_sampling_level=word", "actor.loss_agg_mode=mean",
    "actor.megatron.bridge_type=other", "actor.megatron.override_transformer_config={num_layers: 3}",
    "actor.megatron.override_transformer_config={nothing: 1}", "actor.megatron.recompute_granularity=full",
    "actor.megatron.recompute_num_layers=9", "actor.init_model.num_attention_heads=3", "actor.init_model.hidden_size=7",
    "actor.path=/missing", "actor.path=x", "actor.mb_spec.max_tokens_per_mb=1", "rollout.max_head_offpolicyness=-1",
    "rollout.max_concurrent_rollouts=0", "rollout.oversampling=0.5", "rollout.min_servers=9", "rollout.max_restarts=-1",
    "rollout.branch={after: 0, width: 0}", "sglang.context_length=4", "sglang.mem_fraction_static=2", "sglang.port=80",
    "sglang.extra_args={nothing: 1}", "sglang.extra_args={model_path: x}", "weight_update.mode=pigeon",
    "weight_update.bucket_mb=0", "weight_update.url=ftp://x", "warm_start.steps=0", "warm_start.lr=-1",
    "evaluator.n_samples=0", "evaluator.datasets={a: {path: /missing}}", "evaluator.freq_steps=-1", "recover.mode=maybe",
    "recover.keep=0", "recover.layouts=[megatron:d9]", "saver.freq_steps=-1", "experiment_name=a/b", "trial_name=..",
    "seed=-1", "device=tpu", "total_train_steps=0", "total_train_epochs=0", "algorithm=grpo2", "tokenizer_path=/missing",
    "scheduler.type=slurm", "scheduler.address=10.0.0.1:1", "workflow=missing.module:Agent", "workflow=single", "episode.max_turns=0",
    "episode.timeout_s=0", "episode.history=none", "episode.endpoint=1", "episode.tool_call_parser=none", "adapters={a: {x: 1}}",
    "teacher={}", "teacher={path: /missing}", "critic={}", "ref={}", "ref={update_every_steps: 0}", "stats_logger.wandb={mode: x}",
    "actor.target_modules=[nothing]", "actor.use_lora=true", "actor.group_reward_above=2", "actor.dynamic_sampling=true",
    "actor.overlong_tokens=100", "actor.mask_truncated=1", "actor.discount=2", "actor.behave_imp_weight_mode=x",
    "actor.behave_imp_weight_cap=0", "actor.sapo_tau_pos=0", "actor.dpo_beta=0", "valid_dataset.path=/missing.parquet",
    "valid_dataset.max_samples=0", "train_dataset.max_prompt_length=1", "train_dataset.arithmetic.size=1",
    "train_dataset.arithmetic.max_number=0", "train_dataset.mixture=[]", "train_dataset.weight=2", "unknown=1", "actor.unknown=1",
    "rollout.max_head_offpolicy=1", "gconfig.n_sample=8", "train_dataset.curriculum={low: 0.9, high: 0.1}",
    "${a.b}=1", "seed=${missing}", "gconfig=1", "actor=[]", "rollout.drift_probe_tokens=-1", "rollout.max_logprob_diff=0",
)  # fmt: skip
LAYOUTS = (
    "sglang:d4|megatron:d4", "sglang:d2t2|megatron:d2t2", "sglang:d4|megatron:p2t2", "sglang:d4t2|megatron:d2p2t2c2",
    "sglang:d4|megatron:(attn:d4|ffn:e4)", "sglang:d4|megatron:(attn:t2c2|ffn:e4)", "sglang:d4|fsdp:d4", "megatron:d8t4p4",
    "sglang:d8|megatron:d4t2", "megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)",
)  # fmt: skip
MODELS = (
    "qwen3", "qwen2", "llama", "mistral", "gemma3_text", "qwen3_moe", "olmoe", "mixtral", "glm4_moe", "gpt_oss", "qwen3_next",
    "deepseek_v3",
)  # fmt: skip
GRIDS: dict[str, tuple[str, dict[str, int]]] = {
    "megatron:d1": ("megatron", {}),
    "megatron:d2": ("megatron", {"dp": 2, "edp": 2}),
    "megatron:t2": ("megatron", {"tp": 2, "etp": 2}),
    "megatron:p2": ("megatron", {"pp": 2}),
    "megatron:c2": ("megatron", {"cp": 2, "edp": 2}),
    "megatron:(attn:d2|ffn:e2)": ("megatron", {"dp": 2, "ep": 2}),
    "fsdp:d1": ("fsdp", {}),
    "fsdp:d2": ("fsdp", {"dp": 2}),
}

app = typer.Typer(add_completion=False)


@app.command()
def dump(out: Path, only: str = "configurations,findings,plans,numbers") -> None:
    """Write what the tree of the working directory does."""
    sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("", "trainer", "models"))]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:4])
    parts: dict[str, Callable[[], Iterator[tuple[str, Any]]]] = {
        "configurations": _configurations, "findings": _findings, "plans": _plans, "numbers": _numbers,
    }  # fmt: skip
    found = {name: dict(parts[name]()) for name in only.split(",")}
    out.write_text(json.dumps(found, indent=1, sort_keys=True))
    typer.echo("  ".join(f"{name}: {len(values)}" for name, values in found.items()))


@app.command()
def compare(before: Path, after: Path) -> None:
    """Print what differs between two dumps; ends with 1 if anything does."""
    left, right = (json.loads(file.read_text()) for file in (before, after))
    differing = 0
    for part in sorted(left.keys() & right.keys()):
        names = sorted(left[part].keys() | right[part].keys())
        apart = [name for name in names if left[part].get(name) != right[part].get(name)]
        typer.echo(f"{part}: {len(names) - len(apart)} of {len(names)} equal")
        for name in apart:
            _print_difference(name, left[part].get(name), right[part].get(name))
        differing += len(apart)
    raise typer.Exit(1 if differing else 0)


def _print_difference(name: str, left: Any, right: Any) -> None:
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted(left.keys() | right.keys()):
            if left.get(key) != right.get(key):
                typer.echo(f"  {name} {key}: {_short(left.get(key))} -> {_short(right.get(key))}")
    else:
        typer.echo(f"  {name}: {_short(left)} -> {_short(right)}")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 400 else f"{text[:400]} ..."


def _configurations() -> Iterator[tuple[str, Any]]:
    """Yield the resolved keys of every shipped file that is a run's."""
    from areal_like.core.config.load import load

    listed = subprocess.run(["git", "ls-files", "examples/**/*.yaml"], capture_output=True, text=True, check=True)
    for file in listed.stdout.split():
        if "clusters" not in file:
            yield file, _flat(load(ROOT / file, ["trial_name=t"]).config.model_dump(mode="json"))


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict) or not values:
        return {prefix.rstrip("."): values}
    return {key: value for name, entry in values.items() for key, value in _flat(entry, f"{prefix}{name}.").items()}


def _findings() -> Iterator[tuple[str, Any]]:
    """Yield the findings of wrong values, and of every pair of features, as code, key and severity."""
    for wrong in WRONG:
        yield wrong, _judge([wrong])
    for (name, one), (other, two) in itertools.combinations(FEATURES.items(), 2):
        yield f"{name} + {other}", _judge([*one, *two])


def _judge(overrides: list[str]) -> list[str]:
    from areal_like.core.config.findings import ConfigError
    from areal_like.core.config.load import load
    from areal_like.preflight import preflight

    fixed = ["trial_name=t", f"cluster.fileroot={tempfile.gettempdir()}/unchanged"]
    try:
        findings = preflight(load(ROOT / BASE, [*fixed, *overrides])).findings
    except ConfigError as error:
        findings = tuple(error.findings)
    return sorted(f"{found.code} {found.key} {found.severity.value}" for found in findings)


def _plans() -> Iterator[tuple[str, Any]]:
    """Yield what the compiler prints of layouts: plan, groups and memory."""
    for layout in LAYOUTS:
        for command in ("explain", "groups", "count"):
            yield f"{command} {layout}", _compiler(command, layout)
        for model in ("qwen3-8b", "qwen3-30b-a3b"):
            yield f"memory {layout} {model}", _compiler("memory", layout, "--model", model, "--gpu", "h100")
    for model in ("qwen3-8b", "qwen3-30b-a3b"):
        yield f"plan {model}", _compiler("plan", "--model", model, "--cluster", "1x8", "--gpu", "h100")


def _compiler(*arguments: str) -> str:
    command = [sys.executable, "-m", "allocation", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}, check=False)
    return f"rc={run.returncode} {hashlib.sha256(run.stdout.encode()).hexdigest()[:16]} {run.stdout[:200]}"


def _numbers() -> Iterator[tuple[str, Any]]:
    """Yield log-probs, statistics and weights of three steps; a refusal is its error's first line."""
    import tiny_models
    from trainer_jobs import Setting, three_steps
    from trainer_ranks import Ranks

    from allocation import ParallelSizes

    ranks, folder = Ranks(), Path(tempfile.mkdtemp())
    for name in MODELS:
        variant = tiny_models.VARIANTS[name]
        tiny_models.write_tiny(variant, folder / name)
        for layout, (backend, sizes) in GRIDS.items():
            world = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1) * sizes.get("dp", 1)
            setting = Setting(folder / name, ParallelSizes(**sizes), variant.bridges[0], backend=backend)
            try:
                yield f"{name} {layout}", _digest(ranks.run(three_steps, world, setting))
            except AssertionError as error:  # the ranks' tracebacks
                yield f"{name} {layout}", f"refused: {str(error).strip().splitlines()[-1][:200]}"
            typer.echo(f"{name} {layout}", err=True)
    ranks.close()


def _digest(outcomes: list[Any]) -> dict[str, Any]:
    import numpy as np

    logprobs = [
        np.ascontiguousarray(part).tobytes() for o in outcomes if o.log_probs is not None for part in o.log_probs
    ]
    weights = hashlib.sha256()
    for name, value in sorted(outcomes[0].weights.items()):
        weights.update(name.encode() + np.ascontiguousarray(value).tobytes())
    steps = [{name: repr(float(value)) for name, value in sorted(step.items())} for step in outcomes[0].steps]
    stats = {f"step {place} {name}": value for place, step in enumerate(steps) for name, value in step.items()}
    return {"logprobs": hashlib.sha256(b"".join(logprobs)).hexdigest(), "weights": weights.hexdigest(), **stats}


if __name__ == "__main__":
    app()
