"""A whole run from a Megatron checkpoint alone, and its policy taken out of what it keeps for going on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from running import CONFIG, run
from safetensors.torch import load_file

from areal_like.core.config.load import load
from areal_like.demo.init_model import write_init_model


def convert(*arguments: Path) -> None:
    command = [sys.executable, "-m", "areal_like", "convert-checkpoint", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_a_run_starts_from_megatron_weights_and_its_policy_is_converted(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_init_model(load(CONFIG).config.actor.init_model, model, seed=3)
    convert(model, tmp_path / "megatron")
    (model / "model.safetensors").unlink()
    start = (
        f"actor.path={model}",
        "actor.megatron.use_dist_checkpointing=true",
        f"actor.megatron.dist_checkpointing_path={tmp_path / 'megatron'}",
    )
    short = ("warm_start=null", "evaluator.at_start=false", "evaluator.at_end=false", "total_train_steps=2")
    with run(tmp_path, *start, *short, "recover.mode=auto", "recover.freq_steps=1", "actor.backend=megatron:t2") as one:
        assert one.end() == 0, one.errors  # which it is not where trainer and servers have other weights
    convert(one.directory, tmp_path / "policy")
    policy = load_file(tmp_path / "policy/model.safetensors")
    saved = load_file(one.directory / "checkpoints/step-2/model.safetensors")
    assert policy.keys() == saved.keys()
    assert all(torch.equal(policy[name], saved[name]) for name in saved)
    assert (tmp_path / "policy/tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
