"""Runs whose teacher is the policy, and whose teacher takes the policy's weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import Run, run
from safetensors.numpy import load_file, save_file

from areal_like.core.config.schema import InitModelConfig
from areal_like.demo.init_model import write_init_model

pytestmark = [pytest.mark.long, pytest.mark.covers("distillation")]

SMALL = (
    *("algorithm=distill", "warm_start=null", "valid_dataset=null", "evaluator.freq_steps=null"),
    *("saver.freq_steps=null", "total_train_steps=4"),
)


def metrics(started: Run, name: str) -> list[float]:
    rows = map(json.loads, (started.directory / "metrics.jsonl").read_text().splitlines())
    return [row[name] for row in rows if name in row]


def test_the_policy_teaches_itself_with_the_answer_as_a_hint(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    hinted = ("teacher.from_policy=true", "teacher.hint_field=answer", "teacher.top_k=4", "gconfig.temperature=1.0")
    with run(tmp_path, *SMALL, *hinted) as started:
        assert started.end() == 0, started.output + started.errors
        assert started.remains() == []
    assert len(metrics(started, "train/teacher_kl")) == 4
    assert max(map(abs, metrics(started, "teacher/reverse_kl"))) > 1e-3  # the hint changes what follows
    assert not any(metrics(started, f"teacher/missing/{cause}") for cause in ("late", "refused", "connection"))


def write_model(directory: Path, seed: int) -> Path:
    """Write a model that is sure of what it says."""
    write_init_model(
        InitModelConfig(tokenizer="arithmetic", hidden_size=64, tie_word_embeddings=False), directory, seed=seed
    )
    weights = load_file(directory / "model.safetensors")
    for name, weight in weights.items():
        if "lm_head" in name:
            weight *= 50
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.mark.parametrize("follows", [[], ["teacher.follows=ref", "ref={update_every_steps: 1, ema_decay: 0.5}"]])
def test_a_teacher_becomes_the_policy_that_it_takes_the_weights_of(tmp_path, monkeypatch, follows) -> None:
    """The average of a policy that hardly changes is the policy too."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    policy, teacher = write_model(tmp_path / "policy", 1), write_model(tmp_path / "teacher", 2)
    models = (f"actor.path={policy}", "actor.init_model=null", f"teacher.path={teacher}", "actor.optimizer.lr=1e-7")
    place = ("teacher.backend=sglang:d1", "teacher.update_every_steps=1", "cluster.n_gpus_per_node=4")
    with run(tmp_path, *SMALL, *models, *place, *follows) as started:
        assert started.end() == 0, started.output + started.errors
        assert started.remains() == []
    divergence = metrics(started, "teacher/reverse_kl")
    assert divergence[0] > 0.5
    assert abs(divergence[-1]) < 1e-3, divergence
