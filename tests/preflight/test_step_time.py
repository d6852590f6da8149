"""`areal-like check` predicts the training step, and names quicker micro-batches and recomputation that fit."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from allocation.hardware import GPUS
from areal_like.core.config.load import load
from areal_like.preflight import memory
from areal_like.preflight.layout import find_plan
from areal_like.preflight.model import find_model
from areal_like.preflight.step_time import describe_step

EXAMPLE = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_qwen3_0.6b.yaml"
EXPERTS = ["hidden_size=2048", "num_hidden_layers=16", "num_attention_heads=32", "num_key_value_heads=4",
           "intermediate_size=6144", "num_experts=64", "num_experts_per_tok=8", "moe_intermediate_size=768",
           "tie_word_embeddings=false"]  # fmt: skip
ALONE = ["allocation_mode=sglang:d1+megatron:d1", "cluster.n_gpus_per_node=2"]


@pytest.fixture
def on_h200(monkeypatch):
    monkeypatch.setattr(memory, "gpu_bytes", lambda: GPUS["h200"].memory)


def said(*overrides: str) -> str | None:
    config = load(EXAMPLE, ["device=cuda", *overrides]).config
    spec = find_model(config)[0]
    plan, found = find_plan(config, spec)
    assert plan is not None, found
    return describe_step(config, plan, {"actor": spec})


def test_experts_get_larger_micro_batches_and_their_keys_are_accepted(on_h200):
    shape = [*ALONE, *(f"actor.init_model.{key}" for key in EXPERTS)]
    words = said(*shape)
    assert words is not None and " h200 " in words and "8,192 tokens" in words
    keys = shlex.split(words.partition(" s with ")[2])
    tokens = next(key for key in keys if "max_tokens_per_mb" in key)
    assert int(tokens.partition("=")[2]) > 8192
    again = said(*shape, *keys)
    assert again is not None and "no other" in again


def test_settings_that_do_not_fit_are_not_named(monkeypatch):
    shape = [*ALONE, *(f"actor.init_model.{key}" for key in EXPERTS)]
    monkeypatch.setattr(memory, "gpu_bytes", lambda: GPUS["h200"].memory)
    larger = said(*shape)
    monkeypatch.setattr(memory, "gpu_bytes", lambda: 118 << 30)
    smaller = said(*shape)
    assert (
        larger is not None and smaller is not None and larger.partition(" with ")[2] != smaller.partition(" with ")[2]
    )


def test_an_fsdp_actor_and_a_host_without_gpus_have_no_prediction(on_h200, monkeypatch):
    assert said("allocation_mode=sglang:d1|fsdp:d1") is None
    monkeypatch.setattr(memory, "gpu_bytes", lambda: None)
    assert said() is None
