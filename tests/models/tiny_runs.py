"""Whole runs of tiny models on a CPU with default keys: a server, two steps and the updates after them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from running import Run, run
from support.family_launcher import PLACES
from tiny_models import TIED, VARIANTS, Variant, write_tiny

from areal_like.core.config.schema import InitModelConfig
from areal_like.demo.init_model import write_init_model

STEPS = 2
PROBE, ROUTED = "rollout/logprob_diff_probe", "rollout/routed_share"
REWARD = Path(__file__).parents[1] / "run/varied_reward.py"


def write_runnable(family: str, folder: Path) -> None:
    """Write a tiny model of a family and the tokenizer of the demo, whose vocabulary it has."""
    write_init_model(InitModelConfig(tokenizer="arithmetic", vocab_size=None), folder / "qwen3", seed=0)
    config = json.loads((folder / "qwen3/config.json").read_text())
    ends = {name: config[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    write_tiny(Variant(family, {**VARIANTS[family].fields, **ends, **TIED.get(family, {})}), folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "qwen3" / name, folder / "model" / name)


def run_family(folder: Path, family: str, *settings: str) -> Run:
    """Train a tiny model of a family for two steps; return the finished run."""
    write_runnable(family, folder)
    overrides = (
        *("actor.init_model=null", f"actor.path={folder / 'model'}", f"reward.function={REWARD}:score"),
        *("warm_start=null", "evaluator.at_start=false", "evaluator.at_end=false", "saver.freq_steps=null"),
        *("train_dataset.batch_size=2", "cluster.n_gpus_per_node=2", "rollout.max_head_offpolicyness=0"),
        *(f"total_train_steps={STEPS}", "actor.mb_spec.share_prompts=false"),
    )
    script = Path(__file__).with_name("family_run.py")
    with run(folder, *overrides, *settings, script=script, env={"PYTHONPATH": os.pathsep.join(PLACES)}) as started:
        assert started.end() == 0, started.output + started.errors
    return started


def metric(finished: Run, name: str) -> list[float]:
    """Return the values of a metric at the steps that have it."""
    rows = map(json.loads, (finished.directory / "metrics.jsonl").read_text().splitlines())
    return [row[name] for row in rows if name in row]
