"""Families on a GPU: as exact as transformers in bfloat16, packed, trained, adapted and exported; needs one GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_jobs import merge, two_steps
from safetensors.torch import load_file
from test_mtp import LENGTHS as OF_MTP
from test_mtp import TRAINED as WITH_MTP
from test_mtp import step_and_updates
from tiny_models import VARIANTS, hugging_face_log_probs, write_tiny
from tiny_mtp import PREFIX, expected_of_mtp, write_mtp
from trainer_jobs import GPU, Setting, log_probs_and_weights, make_batch, three_steps
from transformers import AutoModelForCausalLM

from allocation.adapters import adaptable_layers
from allocation.families import TRAINED
from allocation.model_spec import load_model
from areal_like.core.config.schema import OptimizerConfig
from areal_like.core.trainer.engine import LoRA

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LENGTHS = (48, 17, 9, 30, 3, 12, 8, 21)
FAMILIES = ("gemma2", "gemma3_text-window", "gpt_oss", "qwen3_next", "qwen3_5_text", "glm4_moe_lite", "kimi_k2")
# Head sizes that the kernels of GPUs take
WIDE = {
    "gpt_oss": {"head_dim": 64, "hidden_size": 128},
    "glm4_moe_lite": {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64},
    "kimi_k2": {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64},
}
WIDE |= {name: {"head_dim": 64} for name in ("gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text")}


ADAPTED = ("gemma2", "kimi_k2", "qwen3_next", "qwen3_5_text")


def write_model(name: str, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Write a model in bfloat16; return transformers' log-probs in float32 and in bfloat16."""
    variant = VARIANTS[name]
    wide = type(variant)(variant.family, {**variant.fields, **WIDE[variant.family]})
    write_tiny(wide, path).to(torch.bfloat16).save_pretrained(path)
    batch, found = make_batch(lengths=LENGTHS), []
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
        found.append(hugging_face_log_probs(model, batch))
    return found[0], found[1]


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_as_exact_as_transformers_in_bfloat16(ranks, tmp_path, name, backend):
    if backend == "megatron" and VARIANTS[name].family not in TRAINED["megatron"]:
        pytest.skip("no bridge trains it")
    exact, rounded = write_model(name, tmp_path / "model")
    setting = Setting(
        tmp_path / "model", bridge="megatron-bridge", machine=GPU, backend=backend,
        optimizer=OptimizerConfig(lr=1e-3, eps=1e-2),
    )  # fmt: skip
    (((places, values), weights),) = ranks.run(log_probs_and_weights, 1, setting, LENGTHS)
    apart, of_rounding = np.abs(values - exact[places]), np.abs(rounded - exact)[places]
    print(f"{name} {backend}: {np.nanmean(apart):.3g} nats from float32, transformers {np.nanmean(of_rounding):.3g}")
    # Rounding changes the experts of some tokens of qwen3_next, on both backends alike.
    assert np.nanmean(apart) < (2 if name == "qwen3_next" else 1.5) * np.nanmean(of_rounding)
    original = load_file(tmp_path / "model" / "model.safetensors")
    assert weights.keys() == original.keys()
    for key, tensor in original.items():
        np.testing.assert_array_equal(weights[key], tensor.float().numpy(), err_msg=key)
    (outcome,) = ranks.run(three_steps, 1, setting)
    assert all(np.isfinite(step["grad_norm"]) for step in outcome.steps)


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_are_as_exact_as_merged_weights_in_bfloat16(ranks, tmp_path, name, backend):
    """Of latent attention and gated delta nets too: the adapters of a first step, merged by transformers."""
    model = tmp_path / "model"
    write_model(name, model)
    lora = LoRA(rank=8, alpha=16, targets=tuple(adaptable_layers(load_model(str(model)))))
    setting = Setting(
        model, bridge="megatron-bridge", machine=GPU, backend=backend, lora=lora,
        optimizer=OptimizerConfig(lr=1e-2, eps=1e-2),
    )  # fmt: skip
    (trained,) = ranks.run(two_steps, 1, setting, LENGTHS)
    exact, rounded, plain = (
        log_probs_of_merged(model, trained.before if adapted else {}, lora.scale, dtype)
        for dtype, adapted in ((torch.float32, True), (torch.bfloat16, True), (torch.float32, False))
    )
    places, values = trained.log_probs
    apart, of_rounding, of_adapters = (
        np.nanmean(np.abs(each))
        for each in (values - exact[places], (rounded - exact)[places], (plain - exact)[places])
    )
    print(f"{name} {backend}: {apart:.3g} nats from merged, transformers {of_rounding:.3g}, adapters {of_adapters:.3g}")
    assert apart < (2 if name == "qwen3_next" else 1.5) * of_rounding
    assert of_adapters > 2 * apart
    assert all((trained.after[key] != tensor).any() for key, tensor in trained.before.items())


def log_probs_of_merged(model: Path, adapters: dict[str, torch.Tensor], scale: float, dtype: torch.dtype) -> np.ndarray:
    """Log-probs by transformers with adapters in its weights."""
    made = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="eager").eval()
    merge(made, {key: tensor.to(dtype) for key, tensor in adapters.items()}, scale)
    with torch.no_grad():
        return hugging_face_log_probs(made, make_batch(lengths=LENGTHS))


def test_the_layer_for_multi_token_prediction_trains_beside_the_policy(ranks, tmp_path):
    write_mtp("deepseek_v3-yarn", tmp_path, **WIDE["kimi_k2"])
    loss, gradients = expected_of_mtp(tmp_path, OF_MTP)
    invertible = OptimizerConfig(lr=1.0, eps=1.0, weight_decay=0.0, gradient_clipping=1e9)
    trained = Setting(tmp_path, bridge="megatron-bridge", machine=GPU, optimizer=invertible, megatron=WITH_MTP)
    still = replace(trained, megatron={**WITH_MTP, "train_mtp_layers": False})
    ((read, step, updates, _),), ((plain, plain_step, _, _),) = (
        ranks.run(step_and_updates, 1, each) for each in (trained, still)
    )
    print(f"loss {step['mtp_loss']:.4f}, by transformers' layers {loss:.4f}")
    np.testing.assert_array_equal(read[1], plain[1])
    assert step["mtp_loss"] == pytest.approx(loss, rel=0.02)
    assert step["loss"] == pytest.approx(plain_step["loss"], rel=1e-3)
    for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"):
        key = f"{PREFIX}{name}.weight"
        subtracted, gradient = updates[key].ravel(), gradients[key].float().numpy().ravel()
        found = subtracted / (1 - np.abs(subtracted))
        likeness = found @ gradient / np.linalg.norm(found) / np.linalg.norm(gradient)
        print(f"{key}: cosine of gradients {likeness:.4f}")
        assert likeness > 0.95
