"""The keys that `allocation plan` prints are a run's: the checks accept them on the GPU that was planned for."""

import json
import shlex
from pathlib import Path

import pytest
from known import excluded
from typer.testing import CliRunner

from allocation.cli import app
from allocation.hardware import find_gpu
from areal_like.config.load import load
from areal_like.preflight import memory
from areal_like.preflight.layout import find_plan
from areal_like.preflight.megatron_settings import megatron_settings
from areal_like.preflight.model import find_model
from areal_like.preflight.sharing import check_sharing

EXAMPLE = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_qwen3_0.6b.yaml"
SHAPES = {
    "qwen3-8b": ["hidden_size=4096", "num_hidden_layers=36", "num_attention_heads=32", "intermediate_size=12288",
                 "tie_word_embeddings=false"],
    "qwen3-30b-a3b": ["hidden_size=2048", "num_hidden_layers=48", "num_attention_heads=32", "num_key_value_heads=4",
                      "intermediate_size=6144", "num_experts=128", "num_experts_per_tok=8", "moe_intermediate_size=768",
                      "tie_word_embeddings=false"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("qwen3-8b", ["-c", "1x8", "-g", "h200"]),
        ("qwen3-8b", ["-c", "2x8", "-g", "h100", "--response", "2048"]),
        ("qwen3-30b-a3b", ["-c", "1x8", "-g", "h100", "--staleness", "0"]),
        ("qwen3-30b-a3b", ["-c", "4x8", "-g", "h100", "--tokens", "16384"]),
        ("qwen3-30b-a3b", ["-c", "5x8", "-g", "h100", "--first-stage-layers", "9", "--last-stage-layers", "9"]),
    ],
)
def test_printed_keys_are_accepted(monkeypatch, model, more):
    gpu = find_gpu(more[more.index("-g") + 1])
    monkeypatch.setattr(memory, "gpu_bytes", lambda: gpu.memory)
    words = ["plan", "-m", model, "-b", "128x8", *more]
    shown = CliRunner().invoke(app, words, env={"COLUMNS": "80"}).stdout
    printed = shown.partition("Keys of layout 1")[2].partition("\n")[2].partition("\n\n")[0]
    overrides = shlex.split(printed.replace("\\\n", " "))
    first = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["layouts"][0]
    assert overrides[0] == f"allocation_mode={first['allocation']}"

    shape = [f"actor.init_model.{key}" for key in SHAPES[model]]
    config = load(EXAMPLE, ["device=cuda", *shape, *overrides]).config
    plan, found = find_plan(config, find_model(config)[0])
    assert plan is not None, found
    assert not [
        it
        for it in [*check_sharing(config, "cuda", plan), *excluded(config, "cuda", plan=plan)]
        if it.severity == "error"
    ]
    settings = megatron_settings(config.actor)
    assert settings.recompute_granularity == first["recompute_granularity"]
    assert settings.optimizer_offload == first["optimizer_offload"]
    assert list(settings.recompute_modules) == first["recompute_modules"]
    assert settings.num_layers_in_first_pipeline_stage == first["num_layers_in_first_pipeline_stage"]
    assert (config.rollout.sharing == "alternate") == (first["sharing"] == "alternate")
