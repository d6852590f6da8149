"""Auxiliary losses and routers' biases count real tokens: layouts that pad train as one rank, which does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_engine import BIAS, glm  # noqa: F401  # a fixture
from test_layouts import same_training, world
from trainer_jobs import Setting, biases_after_padded_steps, one_short_sequence, three_steps

from allocation import ParallelSizes

BALANCED = {
    "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.2, 0.2],
    "moe_z_loss_coeff": 0.1,
}
LAYERS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ONE_MICRO_BATCH = 200  # tokens: an auxiliary loss is one of a micro-batch


def shown(value: object) -> str:
    return str(value).removeprefix("ParallelSizes")


STORED = [ParallelSizes(cp=2, ep=2)]
RECOMPUTED = [ParallelSizes(tp=2, ep=2)]
MORE_STORED = [ParallelSizes(tp=2, ep=2), ParallelSizes(tp=2, pp=2, ep=2), ParallelSizes(tp=2, cp=2, ep=4)]
MORE_RECOMPUTED = [ParallelSizes(cp=2, ep=2), *MORE_STORED[1:]]


@pytest.mark.parametrize(
    ("sizes", "recompute"),
    [
        *((sizes, {}) for sizes in STORED),
        *((sizes, LAYERS) for sizes in RECOMPUTED),
        *(pytest.param(sizes, {}, marks=pytest.mark.long) for sizes in MORE_STORED),
        *(pytest.param(sizes, LAYERS, marks=pytest.mark.long) for sizes in MORE_RECOMPUTED),
    ],
    ids=shown,
)
def test_auxiliary_losses_ignore_padding(ranks, models, sizes, recompute):
    options = {"megatron": {"override_transformer_config": BALANCED, **recompute}, "max_tokens_per_mb": ONE_MICRO_BATCH}
    (expected,) = ranks.once(three_steps, 1, Setting(models["moe"], **options))
    same_training(ranks.run(three_steps, world(sizes), Setting(models["moe"], sizes, **options)), expected)


def test_a_micro_batch_without_a_sequence_has_no_auxiliary_loss(ranks, models):
    """One sequence for two ranks: the other's micro-batch is padding."""
    loss = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.2, "moe_z_loss_coeff": 0.1}
    options = {"megatron": {"override_transformer_config": loss}}
    (expected,) = ranks.run(one_short_sequence, 1, Setting(models["moe"], **options))
    same_training(
        ranks.run(one_short_sequence, 2, Setting(models["moe"], ParallelSizes(dp=2, ep=2), **options)), expected
    )


def test_padding_does_not_move_the_choice_of_experts(ranks, glm: Path, tmp_path):  # noqa: F811
    """Without biases at first, so that padding would prefer other experts than the tokens do."""
    model = shutil.copytree(glm, tmp_path / "glm")
    weights = load_file(model / "model.safetensors")
    save_file({**weights, BIAS: torch.zeros_like(weights[BIAS])}, model / "model.safetensors", {"format": "pt"})
    moving = {"override_transformer_config": {"moe_router_bias_update_rate": 0.1}}
    setting = Setting(model, megatron=moving, max_tokens_per_mb=1000)
    (expected,) = ranks.run(biases_after_padded_steps, 1, setting, 1, BIAS)
    (padded,) = ranks.run(biases_after_padded_steps, 1, setting, 64, BIAS)
    np.testing.assert_array_equal(padded, expected)
