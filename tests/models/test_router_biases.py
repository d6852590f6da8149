"""Weights of a model with experts move by the optimizer alone: no backend moves routers' biases by default."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.torch import load_file
from test_fsdp_families import LENGTHS
from tiny_models import VARIANTS
from trainer_jobs import Setting, updates

from allocation.families import FAMILIES, TRAINED
from areal_like.core.config.schema import OptimizerConfig

BIASED = ("deepseek_v3", "kimi_k2", "minimax_m2", "glm4_moe", "glm4_moe_lite")
ROUTED = {backend: [name for name in names if FAMILIES[name].experts] for backend, names in TRAINED.items()}
SOON = ("mixtral", "deepseek_v3", "minimax_m2")
STILL = OptimizerConfig(lr=1e-12, eps=1.0, weight_decay=0.0)  # below the last bit of a weight
RATE = 0.01


def cases():
    for backend, names in ROUTED.items():
        for name in names:
            bridges = VARIANTS[name].bridges if backend == "megatron" else ("mbridge",)
            marks = [] if name in SOON else [pytest.mark.long]
            yield from (pytest.param(backend, name, bridge, marks=marks) for bridge in bridges)


@pytest.mark.parametrize(("backend", "name", "bridge"), cases())
def test_a_step_without_a_learning_rate_moves_nothing(ranks, tiny, backend, name, bridge):
    setting = Setting(tiny(name), backend=backend, bridge=bridge, optimizer=STILL)
    (moved,) = ranks.run(updates, 1, setting, LENGTHS)
    assert moved.keys() == load_file(tiny(name) / "model.safetensors").keys()
    assert {key: float(np.abs(by).max()) for key, by in moved.items() if np.abs(by).max() > 1e-11} == {}


@pytest.mark.parametrize(
    "name", [name if name in SOON else pytest.param(name, marks=pytest.mark.long) for name in BIASED]
)
def test_the_rate_of_the_user_moves_biases(ranks, tiny, name):
    moving = {"override_transformer_config": {"moe_router_bias_update_rate": RATE}}
    setting = Setting(tiny(name), bridge="megatron-bridge", optimizer=STILL, megatron=moving)
    (moved,) = ranks.run(updates, 1, setting, LENGTHS)
    biases = {key: np.abs(by).max() for key, by in moved.items() if key.endswith("e_score_correction_bias")}
    assert biases and all(by == pytest.approx(RATE, rel=1e-4) for by in biases.values())
