"""Models of text and images on Megatron on a GPU: as exact as transformers in bfloat16, trained and exported."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_vlms import load_alone, log_probs_alone, vlm_batch, write_vlm
from trainer_jobs import GPU, Setting
from vision_jobs import train_on_images

from areal_like.core.config.schema import OptimizerConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_a_model_with_images_is_as_exact_as_transformers_in_bfloat16(ranks, tmp_path, family, backend):
    write_vlm(family, tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    batch = vlm_batch(tmp_path)
    trained = batch.fields["loss_mask"] > 0
    with torch.no_grad():
        exact, rounded = (
            log_probs_alone(load_alone(tmp_path, dtype), tmp_path, batch).float().numpy()[trained]
            for dtype in (torch.float32, torch.bfloat16)
        )
    setting = Setting(
        tmp_path, bridge="megatron-bridge", machine=GPU, backend=backend, max_tokens_per_mb=160,
        optimizer=OptimizerConfig(lr=1e-3, eps=1e-2),
    )  # fmt: skip
    ((read, steps, weights),) = ranks.run(train_on_images, 1, setting, batch)
    found = np.full(len(batch.tokens), np.nan)
    found[read[0]] = read[1]
    apart, of_rounding = np.abs(found[trained] - exact).mean(), np.abs(rounded - exact).mean()
    print(f"{family} {backend}: {apart:.3g} nats from float32, transformers {of_rounding:.3g}")
    assert apart < 1.5 * of_rounding
    original = {key: t for file in tmp_path.glob("*.safetensors") for key, t in load_file(file).items()}
    assert weights.keys() == original.keys()
    for key, tensor in original.items():
        np.testing.assert_array_equal(weights[key], tensor.float().numpy(), err_msg=key)
    assert all(np.isfinite(step["grad_norm"]) for step in steps) and steps[-1]["loss"] < steps[0]["loss"]
