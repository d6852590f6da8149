from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tolerance import assert_close, close_to
from trainer_jobs import (
    Machine,
    Setting,
    bad_steps,
    complaints,
    initial_weights,
    learning_rates,
    reference_updates,
    store_addresses,
    threads_left,
    three_steps,
)
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, get_scheduler

from allocation import ParallelSizes
from areal_like.core.config.schema import OptimizerConfig

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def test_batches_that_cannot_be_trained_on_are_refused(ranks, models):
    for masked, long in ranks.run(complaints, 2, Setting(models["tied"], ParallelSizes(pp=2))):
        assert "no token of the batch is trained on" in masked
        assert "max_tokens_per_mb" in long


@pytest.mark.parametrize("loss", ["infinite", "steep"])
@pytest.mark.parametrize(
    ("dtype", "distributed", "sizes"),
    [
        pytest.param("float32", True, ParallelSizes(dp=2, edp=2), marks=pytest.mark.long),
        ("float32", False, ParallelSizes(pp=2)),
        ("bfloat16", True, ParallelSizes(tp=2, etp=2)),
        pytest.param("bfloat16", False, ParallelSizes(dp=2, edp=2), marks=pytest.mark.long),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing(ranks, models, loss, dtype, distributed, sizes):
    setting = Setting(
        models["tied"],
        sizes,
        optimizer=OptimizerConfig(lr=1e-2, eps=1e-2, lr_scheduler_type="linear", max_skipped_steps=2),
        total_steps=4,
        machine=Machine("cpu", dtype),
        megatron={"use_distributed_optimizer": distributed},
    )
    untouched = ranks.once(bad_steps, 2, setting, "infinite", 0)
    for seen, expected in zip(ranks.run(bad_steps, 2, setting, loss, 3), untouched, strict=True):
        assert seen.outcomes[:2] == [1.0, 1.0]
        assert re.search(r"the (loss|gradient norm) is -?(inf|nan); more than 2 steps", seen.outcomes[2])
        assert seen.unchanged
        assert seen.good == expected.good
        assert seen.good["skipped"] == 0
        for name, weight in seen.weights.items():
            np.testing.assert_array_equal(weight, expected.weights[name], err_msg=name)


def test_learning_rate_warms_up_decays_and_can_be_replaced_for_a_step(ranks, models):
    optimizer = OptimizerConfig(lr=1.0, warmup_steps=2, lr_scheduler_type="linear", min_lr_ratio=0.2)
    setting = Setting(models["tied"], optimizer=optimizer, total_steps=6)
    rates = ranks.run(learning_rates, 1, setting, 3)[0]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1.0, 0.5, 0.8, 0.6])
    share = optimizer.model_copy(update={"warmup_steps": 0, "warmup_steps_proportion": 0.4})  # int(2.4) steps
    assert ranks.run(learning_rates, 1, Setting(models["tied"], optimizer=share, total_steps=6), 3)[0] == rates


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [pytest.param(0, marks=pytest.mark.long), 2])
def test_from_the_peak_on_rates_are_those_of_transformers(ranks, models, kind, warmup):
    section = OptimizerConfig(lr=1e-2, warmup_steps=warmup, lr_scheduler_type=kind)
    rates = ranks.run(learning_rates, 1, Setting(models["tied"], optimizer=section, total_steps=6), -1)[0]
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    name = "constant_with_warmup" if kind == "constant" else kind
    schedule = get_scheduler(name, sgd, num_warmup_steps=warmup, num_training_steps=6)
    expected = []
    for _ in range(6):
        expected.append(schedule.get_last_lr()[0])
        sgd.step()
        schedule.step()
    assert rates[warmup:] == pytest.approx(expected[warmup:])
    assert all(rate > 0 for rate in rates)


def test_a_single_step_moves(ranks, models):
    setting = Setting(models["tied"], optimizer=OptimizerConfig(lr=1e-2, lr_scheduler_type="cosine"), total_steps=1)
    assert ranks.run(bad_steps, 1, setting, "infinite", 0)[0].good["lr"] == 1e-2


@pytest.mark.parametrize(
    ("optimizer", "steps", "words"),
    [
        (OptimizerConfig(lr_scheduler_type="cosine"), None, "needs the number of training steps"),
        (OptimizerConfig(warmup_steps_proportion=0.1), None, "needs the number of training steps"),
        (OptimizerConfig(warmup_steps=5), 5, "warmup_steps is 5, but the run has only 5"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(ranks, models, optimizer, steps, words):
    with pytest.raises(AssertionError, match=words):
        ranks.run(three_steps, 1, Setting(models["tied"], optimizer=optimizer, total_steps=steps))


def test_more_ranks_than_the_layout_has_are_refused(ranks, models):
    with pytest.raises(AssertionError, match="the layout takes 1 ranks, but 2 were started"):
        ranks.run(three_steps, 2, Setting(models["tied"]))


def test_ranks_listen_on_loopback_alone(ranks, models):
    for addresses in ranks.run(store_addresses, 2, Setting(models["tied"], ParallelSizes(dp=2, edp=2))):
        assert addresses
        assert set(addresses) == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("model", "dtype", "sizes"),
    [
        pytest.param("tied", "float32", ParallelSizes(dp=2, edp=2), marks=pytest.mark.long),
        ("tied", "bfloat16", ParallelSizes(dp=2, edp=2)),
        pytest.param("moe", "float32", ParallelSizes(dp=2, ep=2), marks=pytest.mark.long),
    ],
)
def test_an_engine_takes_its_threads_with_it(ranks, models, model, dtype, sizes):
    setting = Setting(models[model], sizes, machine=Machine("cpu", dtype))
    engines = [ranks.run(threads_left, 2, setting) for _ in range(3)]  # each run meets at a port of its own
    for first, *later in zip(*engines, strict=True):
        assert max(later) <= first


def test_mbridge_names_the_layout_that_it_cannot_export(ranks, models):
    with pytest.raises(AssertionError, match="bridge_type=megatron-bridge"):
        ranks.run(three_steps, 2, Setting(models["moe"], ParallelSizes(tp=2, edp=2)))


@pytest.fixture(scope="module")
def glm(tmp_path_factory) -> Path:
    """Routed experts, which a bias in float32 helps to choose, beside shared ones."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 101, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**sizes, **heads, **experts, tie_word_embeddings=False))
    model.get_buffer(BIAS).copy_(torch.tensor([0.1, 0.2, 8.03, 8.04]))
    folder = tmp_path_factory.mktemp("glm")
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("bridge", ["mbridge", "megatron-bridge"])
def test_what_chooses_experts_is_not_rounded_beside_weights_in_bfloat16(ranks, glm, bridge):
    """Checkpoints and servers have these numbers in float32; a rounded one sends tokens to other experts."""
    (weights,) = ranks.run(initial_weights, 1, Setting(glm, bridge=bridge, machine=Machine("cpu", "bfloat16")))
    np.testing.assert_array_equal(weights[BIAS], load_file(glm / "model.safetensors")[BIAS].numpy())


@pytest.mark.parametrize("bridge", ["mbridge", "megatron-bridge"])
def test_shared_experts_can_be_recomputed_where_a_bridge_would_overlap_them(ranks, glm, bridge):
    recomputed = {"recompute_granularity": "selective", "recompute_modules": ["shared_experts"]}
    (expected,) = ranks.run(three_steps, 1, Setting(glm, bridge=bridge))
    (outcome,) = ranks.run(three_steps, 1, Setting(glm, bridge=bridge, megatron=recomputed))
    assert outcome.steps == [close_to(step) for step in expected.steps]


def test_a_step_that_is_not_finite_leaves_the_choice_of_experts_alone(ranks, glm):
    moving = {"override_transformer_config": {"moe_router_bias_update_rate": 0.1}}
    (seen,) = ranks.run(bad_steps, 1, Setting(glm, megatron=moving), "infinite", 2)
    assert seen.outcomes == [1.0, 1.0] and seen.unchanged
    bias = load_file(glm / "model.safetensors")[BIAS].numpy()
    assert not np.array_equal(seen.weights[BIAS], bias)  # after the good step


def test_a_reference_that_moves_keeps_its_share_of_what_chooses_experts(ranks, glm, tmp_path):
    shutil.copytree(glm, tmp_path / "new")
    tensors = load_file(glm / "model.safetensors")
    old = tensors[BIAS].clone()
    tensors[BIAS] = old + 1
    save_file(tensors, tmp_path / "new/model.safetensors", {"format": "pt"})
    (seen,) = ranks.run(reference_updates, 1, Setting(glm), [(tmp_path / "new", 0.75)])
    assert_close(seen.weights[1][BIAS], old + 0.25)
