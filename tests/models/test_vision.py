"""Models of text and images under FSDP: as transformers computes each sequence alone, in every layout."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_vlms import IMAGE, load_alone, log_probs_alone, vlm_batch, with_deepstack, write_vlm
from tolerance import SEQUENCE, assert_close, assert_gradient, depth_of
from trainer_jobs import Setting
from transformers import AutoConfig
from vision_jobs import log_probs, look, values

from allocation import ParallelSizes
from areal_like.backends.training.image_inputs import IMAGE_MARKS, ImageReader, load_processor
from areal_like.core.trainer.engine import LoRA
from areal_like.core.types import Batch
from areal_like.data.images import ImageError, draw

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma3"]


def fsdp(path: Path, d: int = 1, c: int = 1, **settings) -> Setting:
    return Setting(path, ParallelSizes(dp=d, cp=c, edp=d * c), backend="fsdp", max_tokens_per_mb=160, **settings)


def joined(parts, tokens: int) -> np.ndarray:
    values = np.full(tokens, np.nan)
    for places, found in filter(None, parts):
        values[places] = found
    return values


@pytest.mark.parametrize(
    "family",
    [pytest.param(it, marks=[pytest.mark.long] if it in ("qwen3_vl", "qwen3_5_moe") else []) for it in FAMILIES],
)
@pytest.mark.covers("FSDP")
def test_log_probs_gradients_and_weights_are_transformers_own(ranks, tiny_vlm, family):
    batch, model = vlm_batch(tiny_vlm(family)), load_alone(tiny_vlm(family))
    trained = batch.fields["loss_mask"] > 0
    (seen,) = ranks.run(look, 1, fsdp(tiny_vlm(family)), batch)
    expected = log_probs_alone(model, tiny_vlm(family), batch)
    found = joined([seen.log_probs], len(batch.tokens))
    assert_close(found[trained], expected.detach().numpy()[trained], depth=SEQUENCE)
    (-expected[torch.from_numpy(trained)].mean()).backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    assert seen.gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert_gradient(seen.gradients[name], gradient, depth_of(family), err_msg=name)
    original = {key: t for file in tiny_vlm(family).glob("*.safetensors") for key, t in load_file(file).items()}
    assert seen.weights.keys() == original.keys()
    for key, tensor in original.items():
        np.testing.assert_array_equal(seen.weights[key], tensor.numpy(), err_msg=key)


@pytest.fixture(scope="module")
def one(ranks, tiny_vlm):
    """What one rank sees of each family."""
    return cache(lambda family: ranks.run(look, 1, fsdp(tiny_vlm(family)), vlm_batch(tiny_vlm(family)))[0])


def same(seen, expected, batch):
    found, wanted = (joined(parts, len(batch.tokens)) for parts in ([s.log_probs for s in seen], [expected.log_probs]))
    assert_close(found, wanted, depth=SEQUENCE)
    assert seen[0].gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert_gradient(seen[0].gradients[name], gradient, err_msg=name)


@pytest.mark.parametrize(
    ("family", "d", "c", "settings"),
    [
        ("qwen2_5_vl", 1, 2, {"share_prompts": True}),
        pytest.param("qwen3_vl", 2, 2, {}, marks=pytest.mark.long),
        pytest.param("qwen3_vl_moe", 1, 2, {"share_prompts": True}, marks=pytest.mark.long),
        ("qwen3_5", 2, 1, {}),
        ("gemma3", 3, 1, {"fsdp": {"gradient_checkpointing": True}}),
    ],
)
def test_every_layout_computes_what_one_rank_does(ranks, tiny_vlm, one, family, d, c, settings):
    """Ranks may have images in part, none of them, or nothing at all."""
    batch = vlm_batch(tiny_vlm(family))
    same(ranks.run(look, d * c, fsdp(tiny_vlm(family), d, c, **settings), batch), one(family), batch)


def test_prompts_with_different_images_are_not_shared(tiny_vlm):
    reader = ImageReader(tiny_vlm("qwen3_vl"), load_alone(tiny_vlm("qwen3_vl")).config, None)
    batch = vlm_batch(tiny_vlm("qwen3_vl"))
    first = np.split(batch.tokens, np.cumsum(batch.lengths))[
        3
    ]  # twice the same tokens: with the same images, and with another one
    lengths, mask = np.full(3, len(first), np.int32), np.tile(np.arange(len(first)) >= len(first) - 2, 3)
    other = (draw(90, 40, seed=7), *batch.images[3][1:])
    alike = Batch(lengths, np.tile(first, 3), {"loss_mask": mask.astype(np.float32)})
    marked = reader.mark(replace(alike, images=(batch.images[3], batch.images[3], other)))
    one, two, three = marked.fields[IMAGE_MARKS].reshape(3, -1)
    assert (one == two).all() and ((one != three) == ((first == IMAGE) & (np.arange(len(first)) < 12))).all()


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_a_frozen_tower_has_no_gradient_and_adapters_leave_it_alone(ranks, tiny_vlm, one, family):
    batch, tower = vlm_batch(tiny_vlm(family)), ("model.visual", "model.vision_tower", "model.multi_modal_projector")
    (seen,) = ranks.run(look, 1, fsdp(tiny_vlm(family), freeze_vision_tower=True), batch)
    kept = {name: g for name, g in one(family).gradients.items() if not name.startswith(tower)}
    same([seen], replace(one(family), gradients=kept), batch)
    (seen,) = ranks.run(look, 1, fsdp(tiny_vlm(family), lora=LoRA(4, 8, ("all-linear",))), batch)
    assert seen.gradients and all(name.startswith("model.language_model.layers.") for name in seen.gradients)
    same([replace(seen, gradients={})], replace(one(family), gradients={}), batch)


def test_an_image_token_that_a_model_sampled_is_a_word(ranks, tmp_path):
    """It is computed as another word with the same embedding."""
    model, word = write_vlm("qwen3_vl", tmp_path), 50
    with torch.no_grad():
        model.get_input_embeddings().weight[word] = model.get_input_embeddings().weight[IMAGE]
    model.save_pretrained(tmp_path)
    batch = vlm_batch(tmp_path)
    ends = np.cumsum(batch.lengths)
    sampled, words = batch.tokens.copy(), batch.tokens.copy()
    sampled[ends - 3], words[ends - 3] = IMAGE, word
    batch.fields["loss_mask"][ends - 3] = 0
    ((_, found),) = ranks.run(log_probs, 1, fsdp(tmp_path), replace(batch, tokens=sampled))
    ((_, expected),) = ranks.run(log_probs, 1, fsdp(tmp_path), replace(batch, tokens=words))
    assert_close(found, expected, depth=SEQUENCE)


def test_a_critic_of_a_model_with_images_has_values(ranks, tiny_vlm):
    batch = vlm_batch(tiny_vlm("qwen2_5_vl"))
    (alone,) = ranks.run(values, 1, fsdp(tiny_vlm("qwen2_5_vl"), role="critic"), batch)
    shared = ranks.run(values, 2, fsdp(tiny_vlm("qwen2_5_vl"), 2, role="critic"), batch)
    expected = joined([alone], len(batch.tokens))
    assert not np.isnan(expected[1:21]).any() and np.ptp(expected[1:21]) > 1e-3
    assert_close(joined(shared, len(batch.tokens)), expected, depth=SEQUENCE)


@pytest.mark.parametrize(
    ("family", "settings", "codes"),
    [
        ("qwen2_5_vl", ["actor.backend=fsdp:d2"], []),
        ("qwen3_vl", ["actor.backend=fsdp:d1c2", "actor.mb_spec.share_prompts=true"], []),
        ("gemma3", ["actor.backend=fsdp:d2"], []),
        ("gemma3", ["actor.backend=fsdp:d1c2"], ["RUN-FSDP"]),
        ("gemma3", ["actor.backend=fsdp:d1t2"], ["RUN-FSDP"]),
        ("gemma3", ["actor.backend=fsdp:d2", "actor.mb_spec.share_prompts=true"], ["RUN-SHARED-PROMPTS"]),
        ("gemma3", ["actor.backend=megatron:d2"], ["RUN-IMAGES"]),
        ("qwen3_vl", ["actor.backend=fsdp:d2", "actor.use_lora=true"], []),
        ("qwen3_5", ["actor.backend=fsdp:d2"], []),
        ("qwen3_5_moe", ["actor.backend=fsdp:d2"], []),
        ("qwen3_vl_moe", ["actor.backend=fsdp:d1c2", "actor.mb_spec.share_prompts=true"], []),
        ("qwen3_5", ["actor.backend=fsdp:d1c2"], ["RUN-FSDP"]),
    ],
)
def test_a_run_starts_where_the_model_is_proven(checks, tiny_vlm, tmp_path, family, settings, codes):
    path = tiny_vlm(family)
    if family == "qwen3_vl_moe":
        path = with_deepstack(path, tmp_path / "model", 3)
    assert [error.partition(" ")[0] for error in checks.errors(path, *settings)] == codes


@pytest.mark.parametrize(
    ("attention", "device", "refused"),
    [("null", "cuda", False), ("triton", "cuda", False), ("flashinfer", "cuda", True), ("torch_native", "cpu", False)],
)
def test_triton_alone_computes_whole_images_on_gpus(checks, tiny_vlm, attention, device, refused):
    settings = ["actor.backend=fsdp:d2", "actor.dtype=bfloat16", f"sglang.attention_backend={attention}"]
    errors = checks.errors(tiny_vlm("gemma3"), *settings, device=device)
    assert [error.partition(":")[0] for error in errors] == ["RUN-IMAGES sglang.attention_backend"] * refused


def test_whole_images_are_refused_on_megatron(checks, tiny_vlm):
    (error,) = checks.errors(tiny_vlm("gemma3"), "actor.backend=megatron:d2", "actor.dtype=bfloat16", device="cuda")
    assert error.startswith("RUN-IMAGES actor.path")
    assert error.endswith("which Megatron-core does not support in packed sequences")


@pytest.mark.parametrize("backend", ["fsdp:d2", "megatron:d2"])
@pytest.mark.parametrize(
    ("family", "number", "why"),
    [
        ("qwen3_vl_moe", 2, "has 2 DeepStack layers, and SGLang computes a qwen3_vl_moe with 3"),
        ("qwen3_vl_moe", 0, "stops at the first image"),
        ("qwen3_vl_moe", 3, None),
        ("qwen3_vl", 1, None),
    ],
)
def test_servers_compute_the_deepstack_layers(checks, tiny_vlm, tmp_path, backend, family, number, why):
    path = with_deepstack(tiny_vlm(family), tmp_path / "model", number)
    settings = [f"actor.backend={backend}", "actor.megatron.bridge_type=megatron-bridge"]
    errors = [error for error in checks.errors(path, *settings) if error.startswith("RUN-IMAGES")]
    assert [why in error and error.startswith("RUN-IMAGES actor.path") for error in errors] == [True] * bool(why)


def test_a_model_whose_processor_is_missing_does_not_start(checks, tiny_vlm, tmp_path):
    path = shutil.copytree(tiny_vlm("qwen3_vl"), tmp_path / "model")
    (path / "preprocessor_config.json").unlink()
    (error,) = checks.errors(path, "actor.backend=fsdp:d1")
    assert error.startswith("RUN-IMAGES actor.path") and "has no preprocessor_config.json" in error


def altered(batch: Batch, how: str) -> Batch:
    images = [*batch.images]
    if how == "missing":
        images[1] = images[1][:2]
    elif how == "further":
        images[2] = images[1][:1]
    elif how == "order":
        images[1] = (images[1][1], images[1][0], images[1][2])
    else:
        images[3] = (images[3][0], images[3][1][:200])
    return replace(batch, images=tuple(images))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "sequence 1 of the batch has .* image tokens in a row .* but it has no image after 2"),
        ("further", "sequence 2 of the batch has 1 images, but image tokens .* for 0 of them"),
        ("order", "sequence 1 of the batch has .* image tokens in a row .* but its image 0 takes"),
        ("torn", "sequence 3 of the batch, image 1: the PNG of 200 bytes is damaged"),
    ],
)
def test_images_that_do_not_fit_their_tokens_are_refused(tiny_vlm, how, message):
    path = tiny_vlm("qwen2_5_vl")
    reader = ImageReader(path, AutoConfig.from_pretrained(path), None)
    with pytest.raises(ImageError, match=message):
        reader.mark(altered(vlm_batch(path), how))


def test_a_model_without_processor_files_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no image processor .*preprocessor_config\.json.* Copy the file"):
        load_processor(tmp_path)
