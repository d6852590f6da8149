"""Adapters of every family train as merged weights do in transformers, on both backends."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_jobs import INVERTIBLE, Trained, log_probs_and_gradients, merge, two_steps
from safetensors.torch import load_file
from test_fsdp_families import alone
from tiny_models import (
    FAMILIES,
    FSDP_DENSE,
    FSDP_EXPERTS,
    FSDP_OTHERS,
    MBRIDGE,
    TWO_RANKS,
    VARIANTS,
    Variant,
    config_of,
)
from trainer_jobs import Setting, resume, save_after_two_steps
from transformers import AutoModelForCausalLM

from allocation import ParallelSizes
from allocation.adapters import adaptable_layers
from allocation.families import TRAINED
from allocation.model_spec import from_config, load_model
from areal_like.config.schema import OptimizerConfig
from areal_like.trainer.engine import LoRA

pytestmark = pytest.mark.covers("LoRA")

SCALE = 2.0
LENGTHS = (20, 17, 9, 3)  # beyond the tiny models' windows
TOLERANCE = 1e-4
LONG = pytest.mark.long
SOON = ("llama", "gemma2", "deepseek_v3", "qwen3_next", "qwen3_5_text")
FSDP = (*FSDP_DENSE, *FSDP_EXPERTS, *FSDP_OTHERS)
MEGATRON = [name for name in FAMILIES if FAMILIES[name][1]]
LAYOUTS = [
    ("deepseek_v3", TWO_RANKS[0]),
    ("qwen3_5_text", TWO_RANKS[0]),
    ("qwen3_next", TWO_RANKS[0]),
    *(
        pytest.param(name, sizes, marks=LONG)
        for name in ("deepseek_v3", "qwen3_next", "qwen3_5_moe_text")
        for sizes in TWO_RANKS[1:]
    ),
]


def setting(path: Path, backend: str, sizes: ParallelSizes | None = None) -> Setting:
    lora = LoRA(rank=4, alpha=4 * SCALE, targets=tuple(adaptable_layers(load_model(str(path)))))
    bridge = FAMILIES[load_model(str(path)).family][1][-1:] or MBRIDGE
    made = Setting(path, sizes or ParallelSizes(), bridge=bridge[0], backend=backend)
    return replace(made, lora=lora, optimizer=INVERTIBLE)


def check(path: Path, of_ranks: list[Trained]) -> None:
    """Compare with transformers: log-probs, exported weights, and the gradients of both matrices of each adapter."""
    first, model = of_ranks[0], alone(path)
    parameters = merge(model, first.before, SCALE)
    expected, gradients = log_probs_and_gradients(model, parameters, LENGTHS)
    for rank in of_ranks:
        if rank.log_probs is not None:
            np.testing.assert_allclose(rank.log_probs[1], expected[rank.log_probs[0]], atol=TOLERANCE)
    assert first.after.keys() == gradients.keys()
    for name, gradient in gradients.items():
        step = (first.before[name] - first.after[name]).numpy()
        magnified = (1 + float(gradient.abs().max())) ** 2  # rounding, by the inversion
        np.testing.assert_allclose(step / (1 - np.abs(step)), gradient, atol=1e-5 * magnified, err_msg=name)
    original = load_file(path / "model.safetensors")
    for name, a in first.before.items():
        if ".lora_A." in name:
            b = first.before[name.replace("lora_A", "lora_B")]
            assert b.abs().max() > 0
            original[name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")] += SCALE * b @ a
    assert first.weights.keys() == original.keys()
    for name, weight in original.items():
        np.testing.assert_allclose(first.weights[name], weight.numpy(), atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", [name if name in SOON else pytest.param(name, marks=LONG) for name in FSDP])
def test_adapters_under_fsdp_train_as_merged_weights(ranks, tiny, name):
    check(tiny(name), ranks.run(two_steps, 1, setting(tiny(name), "fsdp"), LENGTHS))


@pytest.mark.parametrize("name", [name if name in SOON else pytest.param(name, marks=LONG) for name in MEGATRON])
def test_adapters_on_megatron_train_as_merged_weights(ranks, tiny, name):
    check(tiny(name), ranks.run(two_steps, 1, setting(tiny(name), "megatron"), LENGTHS))


@pytest.mark.parametrize(("name", "sizes"), LAYOUTS, ids=str)
def test_adapters_in_megatron_layouts_train_as_merged_weights(ranks, tiny, name, sizes):
    world = sizes.dp * sizes.tp * sizes.pp * sizes.cp
    check(tiny(name), ranks.run(two_steps, world, setting(tiny(name), "megatron", sizes), LENGTHS))


@pytest.mark.parametrize("name", ["qwen3_5_text", pytest.param("deepseek_v3", marks=LONG)])
def test_one_rank_resumes_what_two_ranks_saved(ranks, tiny, tmp_path, name):
    split = replace(setting(tiny(name), "megatron", TWO_RANKS[0]), optimizer=OptimizerConfig(lr=1e-2, eps=1e-2))
    expected = ranks.run(save_after_two_steps, 2, split, tmp_path)[0]
    steps = ranks.run(resume, 1, replace(split, sizes=ParallelSizes()), tmp_path)[0]
    assert steps == [pytest.approx(step, rel=TOLERANCE) for step in expected]


def test_every_family_is_tested():
    tested = {VARIANTS[name].family for name in FSDP}, {VARIANTS[name].family for name in MEGATRON}
    assert tested == tuple({*TRAINED[backend]} for backend in ("fsdp", "megatron"))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name in TRAINED["fsdp"]])
def test_the_layers_are_the_linear_layers_of_transformers(family):
    """Names and sizes; with experts, those of attention and delta nets."""
    config = config_of(Variant(family))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    spec, expected = from_config(config.to_dict()), Counter()
    for name, layer in model.named_modules():
        attention = "attn" in name
        if isinstance(layer, torch.nn.Linear) and ".layers." in name and (attention or not spec.experts):
            expected[name.rpartition(".")[2]] += layer.in_features + layer.out_features
    assert adaptable_layers(spec) == expected
