"""Under FSDP every family is computed as transformers does for each sequence alone, and exported as it was loaded."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from conversions import trained
from safetensors.torch import load_file, save_file
from tiny_models import (
    FSDP_COUNTED,
    FSDP_DENSE,
    FSDP_EXPERTS,
    FSDP_LAYOUTS,
    FSDP_OTHERS,
    VARIANTS,
    hugging_face_log_probs,
    write_tiny,
)
from tolerance import SEQUENCE, assert_close, assert_gradient, depth_of
from trainer_jobs import Setting, fsdp_gradients, log_probs_and_weights, make_batch, moved_reference
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from allocation import ParallelSizes
from allocation.families import TRAINED
from areal_like.backends.fsdp import attention
from areal_like.backends.fsdp import model as fsdp_model
from areal_like.backends.fsdp.conversion import to_hugging_face
from areal_like.backends.fsdp.counting import count
from areal_like.backends.fsdp.support import SPLIT
from areal_like.backends.fsdp.tensor_parallel import PARTIAL, ROWS

SOON = (
    "llama",
    "gemma3_text-window",
    "qwen3_5_text",
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
    "minimax_m2",
    "qwen3_next",
)
LENGTHS = (48, 17, 9, 30, 3, 12, 8, 21)  # beyond the tiny models' windows


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    @cache
    def make(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        write_tiny({**VARIANTS, **FSDP_COUNTED}[name], path)
        return path

    return make


def log_probs_without_sinks(*arguments):
    """What an attention would do that knows no sinks."""

    def lose(*of_attention, s_aux=None, **others):
        return packed(*of_attention, **others)

    packed = attention.packed_attention
    with mock.patch.object(attention, "packed_attention", lose):
        try:
            return log_probs_and_weights(*arguments)
        finally:
            attention.AttentionInterface.register(attention.NAME, packed)


def log_probs_with_one_state(*arguments):
    """What gated delta nets would do that know no packs."""
    with mock.patch.object(fsdp_model, "pack_delta_nets"):
        return log_probs_and_weights(*arguments)


def fsdp(path: Path, d: int = 1) -> Setting:
    return Setting(path, ParallelSizes(dp=d, edp=d), backend="fsdp")


def alone(path: Path) -> torch.nn.Module:
    """The model as transformers computes it without an engine of ours: one sequence after another, expert by expert."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **plain).eval()


def expected_gradients(path: Path) -> dict[str, np.ndarray]:
    """Autograd's of the mean log-prob of the trained tokens, each sequence alone."""
    model, batch = alone(path), make_batch(lengths=LENGTHS)
    starts = np.cumsum(batch.lengths) - batch.lengths
    trained = batch.fields["loss_mask"] > 0
    trained[starts] = False
    for start, length in zip(starts, batch.lengths, strict=True):
        tokens = torch.from_numpy(batch.tokens[start : start + length]).long()
        predicted = torch.log_softmax(model(tokens[None], use_cache=False).logits[0], -1)[:-1]
        said = predicted.gather(1, tokens[1:, None])[:, 0]
        (-(said * torch.from_numpy(trained[start + 1 : start + length])).sum() / int(trained.sum())).backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "name",
    [
        name if name in SOON else pytest.param(name, marks=pytest.mark.long)
        for name in (*FSDP_DENSE, *FSDP_EXPERTS, *FSDP_OTHERS)
    ],
)
def test_log_probs_and_weights_are_transformers_own(ranks, tiny, name):
    ((log_probs, weights),) = ranks.run(log_probs_and_weights, 1, fsdp(tiny(name)), LENGTHS)
    expected = hugging_face_log_probs(alone(tiny(name)), make_batch(lengths=LENGTHS))
    values = np.full(len(expected), np.nan)
    values[log_probs[0]] = log_probs[1]
    assert_close(values, expected, depth=SEQUENCE)
    original = {key: t for file in tiny(name).glob("*.safetensors") for key, t in load_file(file).items()}
    assert weights.keys() == original.keys()
    for key, tensor in original.items():
        np.testing.assert_array_equal(weights[key], tensor.numpy(), err_msg=key)


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("mixtral", "deepseek_v3", "gpt_oss", "qwen3_next")
        else pytest.param(name, marks=pytest.mark.long)
        for name in FSDP_EXPERTS
    ],
)
def test_gradients_are_autograds_of_each_sequence_alone(ranks, tiny, name):
    found, expected = ranks.run(fsdp_gradients, 2, fsdp(tiny(name), 2), LENGTHS)[0], expected_gradients(tiny(name))
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        assert_gradient(found[key], gradient, depth_of(name), err_msg=key)


SHORT = ("llama-mlp-bias", "phi3")


@pytest.mark.parametrize(
    "name",
    [
        *SHORT,
        *(pytest.param(name, marks=pytest.mark.long) for name in sorted({*SPLIT, "qwen3-bias"} - {*SHORT})),
    ],
)
def test_ranks_that_split_matrices_compute_the_same_gradients(ranks, tiny, name):
    setting = Setting(tiny(name), ParallelSizes(tp=2), backend="fsdp")
    found, expected = ranks.run(fsdp_gradients, 2, setting, LENGTHS)[0], expected_gradients(tiny(name))
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        assert_gradient(found[key], gradient, err_msg=key)


def test_the_families_whose_matrices_are_split_have_a_plan_that_can_be_followed():
    plans = {name: CONFIG_MAPPING[name].base_model_tp_plan for name in TRAINED["fsdp"] if name in CONFIG_MAPPING}
    followed = {*ROWS, "colwise", "colwise_gather_output", PARTIAL}
    able = {name for name, plan in plans.items() if plan and {*plan.values()} <= followed}
    assert able - {"qwen2_moe", "qwen3_5_text"} == SPLIT  # these have experts or gated delta nets without a plan


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("starcoder2", "granitemoe") else pytest.param(name, marks=pytest.mark.long)
        for name in FSDP_COUNTED
    ],
)
def test_a_counted_family_is_computed_counted_and_exported_as_transformers_has_it(ranks, tiny, name):
    """Families that only transformers knows: log-probs, gradients, tensors, and the sizes that a run counts."""
    ((log_probs, weights),) = ranks.run(log_probs_and_weights, 1, fsdp(tiny(name)), LENGTHS)
    expected = hugging_face_log_probs(alone(tiny(name)), make_batch(lengths=LENGTHS))
    assert_close(log_probs[1], expected[log_probs[0]], depth=SEQUENCE)
    original = {key: t for file in tiny(name).glob("*.safetensors") for key, t in load_file(file).items()}
    assert weights.keys() == original.keys()
    for key, tensor in original.items():
        np.testing.assert_array_equal(weights[key], tensor.numpy(), err_msg=key)
    gradients, wanted = ranks.run(fsdp_gradients, 2, fsdp(tiny(name), 2), LENGTHS)[0], expected_gradients(tiny(name))
    assert gradients.keys() == wanted.keys()
    for key, gradient in wanted.items():
        assert_gradient(gradients[key], gradient, depth_of(name), err_msg=key)
    counted = count(json.loads((tiny(name) / "config.json").read_text()))
    assert not counted.problem
    assert counted.tensors == {key: tuple(tensor.shape) for key, tensor in original.items()}
    assert counted.counted["total"] == sum(p.numel() for p in alone(tiny(name)).parameters())


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_a_checkpoint_of_it_becomes_the_saved_model(ranks, tiny, tmp_path, name):
    ranks.run(trained, 1, fsdp(tiny(name)), tmp_path)
    (tmp_path / "converted").mkdir()
    to_hugging_face(tmp_path / "state", tiny(name), tiny(name), "float32", tmp_path / "converted")
    saved, converted = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "converted"))
    assert converted.keys() == saved.keys() == load_file(tiny(name) / "model.safetensors").keys()
    assert all(torch.equal(converted[key], tensor) for key, tensor in saved.items())


def test_a_reference_of_it_moves_towards_another_checkpoint(ranks, tiny, tmp_path):
    """The router's bias, which is not a parameter, and each expert's own tensors."""
    first = load_file(tiny("deepseek_v3") / "model.safetensors")
    other = shutil.copytree(tiny("deepseek_v3"), tmp_path / "other")
    save_file({key: 3 * tensor for key, tensor in first.items()}, other / "model.safetensors", {"format": "pt"})
    ((weights, _),) = ranks.run(moved_reference, 1, fsdp(tiny("deepseek_v3")), other, tmp_path / "state")
    assert weights.keys() == first.keys()
    for key, tensor in first.items():
        np.testing.assert_allclose(weights[key], 2 * tensor.numpy(), rtol=1e-6, err_msg=key)


@pytest.mark.parametrize(("name", "sizes"), FSDP_LAYOUTS, ids=lambda value: value if isinstance(value, str) else "c2")
def test_ranks_share_sequences_of_it(ranks, tiny, name, sizes):
    """With two ranks for each sequence, each rank computes some heads, and their sinks."""
    setting = Setting(tiny(name), sizes, backend="fsdp")
    expected = hugging_face_log_probs(alone(tiny(name)), make_batch(lengths=LENGTHS))
    for (places, values), _ in ranks.run(log_probs_and_weights, 2, setting, LENGTHS):
        assert_close(values, expected[places], depth=SEQUENCE)


def test_a_model_that_mixes_packed_sequences_is_refused_with_the_distance(ranks, tiny):
    """Gated delta nets that carry their state from one sequence to the next, as transformers' own do."""
    with pytest.raises(AssertionError, match=r"qwen3_next \(model_type\) computes packed sequences 0\.\d+ nats"):
        ranks.run(log_probs_with_one_state, 1, fsdp(tiny("qwen3_next")), LENGTHS)


def test_a_model_whose_sinks_are_lost_is_refused_with_the_distance(ranks, tiny):
    with pytest.raises(AssertionError, match=r"gpt_oss \(model_type\) computes packed sequences [\d.]+ nats"):
        ranks.run(log_probs_without_sinks, 1, fsdp(tiny("gpt_oss")), LENGTHS)
