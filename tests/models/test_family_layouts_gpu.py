"""Families on two GPUs: every layout is as exact as transformers in bfloat16, and trains."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_families_gpu import LENGTHS, write_model
from trainer_jobs import GPU, Setting, log_probs_and_weights, three_steps

from allocation import ParallelSizes
from areal_like.core.config.schema import OptimizerConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
TENSOR, PIPELINE = ParallelSizes(tp=2, edp=2), ParallelSizes(pp=2)
EXPERT, CONTEXT = ParallelSizes(dp=2, ep=2), ParallelSizes(cp=2, edp=2)
ROWS = [
    *(("gpt_oss", sizes) for sizes in (TENSOR, PIPELINE, EXPERT)),
    *(("kimi_k2", sizes) for sizes in (TENSOR, EXPERT, CONTEXT)),
    *(("qwen3_next", sizes) for sizes in (TENSOR, EXPERT, CONTEXT)),
    ("gemma2", TENSOR),
    ("gemma2", CONTEXT),
    ("gemma3_text-window", PIPELINE),
]


@pytest.mark.parametrize(("name", "sizes"), ROWS, ids=str)
def test_a_layout_is_as_exact_as_transformers_in_bfloat16(ranks, tmp_path, name, sizes):
    exact, rounded = write_model(name, tmp_path / "model")
    setting = Setting(
        tmp_path / "model", sizes, bridge="megatron-bridge", machine=GPU, optimizer=OptimizerConfig(lr=1e-3, eps=1e-2)
    )
    found = [each for each, _ in ranks.run(log_probs_and_weights, 2, setting, LENGTHS) if each is not None]
    apart, of_rounding = np.full(exact.shape, np.nan), np.nanmean(np.abs(rounded - exact))
    for places, values in found:
        apart[places] = np.abs(values - exact[places])
    assert np.array_equal(np.isnan(apart), np.isnan(exact))
    print(f"{name} {sizes}: {np.nanmean(apart):.3g} nats from float32, transformers {of_rounding:.3g}")
    assert np.nanmean(apart) < (2 if name == "qwen3_next" else 1.5) * of_rounding
    for outcome in ranks.run(three_steps, 2, setting):
        assert all(np.isfinite(step["grad_norm"]) for step in outcome.steps)
