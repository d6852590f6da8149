"""Families on a GPU: as exact as transformers in bfloat16, packed, trained and exported; needs one GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import VARIANTS, hugging_face_log_probs, write_tiny
from trainer_jobs import GPU, Setting, log_probs_and_weights, make_batch, three_steps
from transformers import AutoModelForCausalLM

from allocation.families import TRAINED
from areal_like.config.schema import OptimizerConfig

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
