"""Models of text and images on Megatron: as transformers computes each sequence alone, in every layout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_vlms import load_alone, log_probs_alone, save_vlm, vlm_batch, with_deepstack, write_vlm
from tolerance import BACKWARD, SEQUENCE, assert_close, assert_gradient, close_to, depth_of
from trainer_jobs import Setting
from vision_jobs import follow, load_and_go_on, save_and_go_on, step, values

from allocation import ParallelSizes
from areal_like.backends.fsdp.checkpoint_names import in_checkpoint
from areal_like.core.trainer.engine import LoRA

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
LONG = pytest.mark.long


def megatron(path: Path, d: int = 1, t: int = 1, p: int = 1, c: int = 1, e: int = 1, **settings) -> Setting:
    sizes = ParallelSizes(dp=d, tp=t, pp=p, cp=c, edp=d * t * c // e, etp=1, ep=e)
    return Setting(path, sizes, bridge="megatron-bridge", max_tokens_per_mb=160, **settings)


def joined(parts, tokens: int) -> np.ndarray:
    values = np.full(tokens, np.nan)
    for places, found in filter(None, parts):
        values[places] = found
    return values


def stored(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    "family", [pytest.param(it, marks=[LONG] if it in ("qwen3_vl", "qwen3_5") else []) for it in FAMILIES]
)
def test_log_probs_gradients_and_weights_are_transformers_own(tiny_vlm, one, family):
    path, seen = tiny_vlm(family), one(family)
    batch, model = vlm_batch(path), load_alone(path)
    trained = batch.fields["loss_mask"] > 0
    expected = log_probs_alone(model, path, batch)
    found = joined([seen.log_probs], len(batch.tokens))
    assert_close(found[trained], expected.detach().numpy()[trained], depth=SEQUENCE)
    original = stored(path)
    assert seen.weights.keys() == original.keys()
    for name, tensor in original.items():
        np.testing.assert_array_equal(seen.weights[name], tensor.numpy(), err_msg=name)
    (-expected[torch.from_numpy(trained)].mean()).backward()
    own = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    gradients = {key: part for name, grad in own for key, part in in_checkpoint(model, name, grad).items()}
    assert seen.gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert_gradient(seen.gradients[name], gradient, depth_of(family), err_msg=name)


@pytest.fixture(scope="module")
def one(ranks, tiny_vlm):
    """What one rank sees of each family."""
    return cache(lambda family: ranks.run(step, 1, megatron(tiny_vlm(family)), vlm_batch(tiny_vlm(family)))[0])


def same(seen, expected, batch, left_out: str = "nothing"):
    found, wanted = (joined(parts, len(batch.tokens)) for parts in ([s.log_probs for s in seen], [expected.log_probs]))
    assert_close(found, wanted, depth=SEQUENCE)
    assert seen[0].weights.keys() == expected.weights.keys()
    for name, gradient in expected.gradients.items():
        np.testing.assert_array_equal(seen[0].weights[name], expected.weights[name], err_msg=name)
        gradient = np.zeros_like(gradient) if left_out in name else gradient
        assert_gradient(seen[0].gradients[name], gradient, err_msg=name)


TWO_STAGES = {"override_transformer_config": {"num_layers_in_first_pipeline_stage": 2}}
LAYOUTS = [
    ("qwen3_vl", {"c": 2}, {"share_prompts": True}),
    ("qwen3_vl_moe", {"p": 2}, {"megatron": TWO_STAGES}),
    ("qwen3_5_moe", {"d": 2}, {"e": 2}),
]
MORE_LAYOUTS = [
    ("qwen2_5_vl", {"t": 2}, {}),
    ("qwen3_vl", {"t": 2}, {"share_prompts": True}),
    ("qwen2_5_vl", {"p": 2}, {"megatron": TWO_STAGES}),
    ("qwen3_vl", {"p": 2}, {"megatron": TWO_STAGES}),
    ("qwen2_5_vl", {"d": 2}, {"share_prompts": True}),
    ("qwen3_vl", {"d": 2, "t": 2}, {}),
    ("qwen2_5_vl", {"c": 2}, {}),
    ("qwen3_vl", {"c": 2, "t": 2}, {}),
    ("qwen3_vl_moe", {"d": 2}, {"e": 2}),
    ("qwen3_vl_moe", {"t": 2}, {"share_prompts": True}),
    ("qwen3_5", {"t": 2}, {}),
    ("qwen3_5_moe", {"p": 2}, {"megatron": TWO_STAGES}),
]


@pytest.mark.parametrize(
    ("family", "layout", "settings"), [*LAYOUTS, *(pytest.param(*row, marks=LONG) for row in MORE_LAYOUTS)]
)
def test_every_layout_computes_what_one_rank_does(ranks, tiny_vlm, one, family, layout, settings):
    """Ranks may have images in part, none of them, or nothing at all."""
    setting, batch = megatron(tiny_vlm(family), **layout, **settings), vlm_batch(tiny_vlm(family))
    same(ranks.run(step, np.prod(list(layout.values())), setting, batch), one(family), batch)


@pytest.mark.parametrize(
    ("family", "layers", "sizes"), [("qwen2_5_vl", 4, {}), pytest.param("qwen3_vl", 8, {"tp": 2}, marks=LONG)]
)
def test_a_virtual_pipeline_computes_what_one_rank_does(ranks, tmp_path, family, layers, sizes):
    write_vlm(family, tmp_path, num_hidden_layers=layers)
    setting, batch = megatron(tmp_path), vlm_batch(tmp_path)
    (expected,) = ranks.run(step, 1, setting, batch)
    virtual = replace(setting, sizes=ParallelSizes(pp=2, vpp=2, etp=sizes.get("tp", 1), **sizes))
    same(ranks.run(step, 2 * sizes.get("tp", 1), virtual, batch), expected, batch)


def test_recomputed_layers_see_the_same_images(ranks, tiny_vlm, one):
    family = "qwen2_5_vl"
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    batch = vlm_batch(tiny_vlm(family))
    same(ranks.run(step, 1, megatron(tiny_vlm(family), megatron=full), batch), one(family), batch)


@pytest.mark.parametrize("layout", [pytest.param({}, marks=LONG), {"p": 2, "megatron": TWO_STAGES}])
def test_a_frozen_tower_stays_as_it_is(ranks, tiny_vlm, one, layout):
    family = "qwen3_vl"
    batch = vlm_batch(tiny_vlm(family))
    setting = megatron(tiny_vlm(family), freeze_vision_tower=True, **layout)
    same(ranks.run(step, layout.get("p", 1), setting, batch), one(family), batch, left_out="visual")


@pytest.mark.parametrize(
    ("family", "layout"),
    [pytest.param("qwen2_5_vl", {"t": 2}, marks=LONG), ("qwen3_vl", {"p": 2, "megatron": TWO_STAGES})],
)
def test_adapters_are_those_of_fsdp(ranks, tiny_vlm, family, layout):
    batch, lora = vlm_batch(tiny_vlm(family)), LoRA(4, 8, ("all-linear",))
    (expected,) = ranks.run(step, 1, megatron(tiny_vlm(family), lora=lora, backend="fsdp"), batch)
    changed = {name for name, gradient in expected.gradients.items() if gradient.any()}
    assert changed and all(".layers." in name and "visual" not in name for name in changed)
    same(ranks.run(step, 2, megatron(tiny_vlm(family), lora=lora, **layout), batch), expected, batch)


@pytest.mark.parametrize(
    ("first", "then"),
    [({"t": 2}, {"p": 2, "megatron": TWO_STAGES}), pytest.param({"d": 2}, {"c": 2}, marks=LONG)],
)
def test_a_checkpoint_goes_on_in_another_layout(ranks, tiny_vlm, tmp_path, first, then):
    path = tiny_vlm("qwen3_vl")
    (right, expected), *_ = ranks.run(save_and_go_on, 2, megatron(path, **first), vlm_batch(path), tmp_path)
    (step_then, found), *_ = ranks.run(load_and_go_on, 2, megatron(path, **then), vlm_batch(path), tmp_path)
    assert step_then == close_to(right)
    changed = {name for name, tensor in stored(path).items() if np.abs(expected[name] - tensor.numpy()).max() > 1e-3}
    assert any("visual.blocks" in name for name in changed)
    for name, weight in expected.items():
        assert_close(found[name], weight, depth=BACKWARD, err_msg=name)


def test_a_critic_has_the_values_of_fsdp(ranks, tiny_vlm):
    path = tiny_vlm("qwen2_5_vl")
    batch, setting = vlm_batch(path), megatron(path, role="critic")
    (under_fsdp,) = ranks.run(values, 1, replace(setting, backend="fsdp"), batch)
    two = ranks.run(values, 2, megatron(path, t=2, role="critic"), batch)
    found, expected = joined(two, len(batch.tokens)), joined([under_fsdp], len(batch.tokens))
    assert_close(found, expected, depth=SEQUENCE)


@pytest.mark.parametrize(
    "family", [*(pytest.param(it, marks=LONG) for it in ("qwen2_5_vl", "qwen3_vl")), "qwen3_vl_moe"]
)
def test_a_reference_follows_the_weights_of_another_checkpoint(ranks, tiny_vlm, tmp_path, family):
    path, batch = tiny_vlm(family), vlm_batch(tiny_vlm(family))
    model = load_alone(path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    save_vlm(model, tmp_path)
    before, after = stored(path), stored(tmp_path)
    found, *_ = ranks.run(follow, 2, megatron(path, p=2, megatron=TWO_STAGES, role="ref"), batch, tmp_path)
    assert found.keys() == before.keys()
    for name, weight in found.items():
        assert_close(weight, before[name].lerp(after[name], 1 / 3).numpy(), depth=BACKWARD, err_msg=name)


BRIDGE = "actor.megatron.bridge_type=megatron-bridge"


@pytest.mark.parametrize(
    ("family", "settings", "errors"),
    [
        ("qwen2_5_vl", ["actor.backend=megatron:d2", BRIDGE], []),
        ("qwen3_vl", ["actor.backend=megatron:d1t2c2", BRIDGE, "actor.mb_spec.share_prompts=true"], []),
        ("qwen3_5", ["actor.backend=megatron:d2", BRIDGE], []),
        ("qwen3_5_moe", ["actor.backend=megatron:(attn:d2|ffn:e2)", BRIDGE], []),
        ("qwen3_vl_moe", ["actor.backend=megatron:(attn:d2|ffn:e2)", BRIDGE, "actor.mb_spec.share_prompts=true"], []),
        ("qwen3_vl", ["actor.backend=megatron:d2"], ["RUN-IMAGES actor.megatron.bridge_type"]),
        ("qwen3_vl", ["actor.backend=megatron:d2", BRIDGE, "actor.use_lora=true"], []),
        (
            "qwen3_vl",
            ["actor.backend=megatron:d1p3", BRIDGE],
            ["RUN-IMAGES actor.backend"],
        ),
        (
            "qwen3_vl",
            [
                *("actor.backend=megatron:d1", BRIDGE, "actor.megatron.recompute_granularity=full"),
                *("actor.megatron.recompute_method=uniform", "actor.megatron.recompute_num_layers=1"),
            ],
            ["RUN-IMAGES actor.megatron.recompute_granularity"],
        ),
        (
            "qwen3_5",
            ["actor.backend=megatron:d2", BRIDGE, "actor.mb_spec.share_prompts=true"],
            ["RUN-SHARED-PROMPTS actor.mb_spec.share_prompts"],
        ),
    ],
)
def test_a_run_starts_where_the_trainer_is_proven(checks, tiny_vlm, tmp_path, family, settings, errors):
    path = tiny_vlm(family)
    if family == "qwen3_vl_moe":
        path = with_deepstack(path, tmp_path / "model", 3)
    assert [error.partition(":")[0] for error in checks.errors(path, *settings)] == errors
