"""The same engine with Transformer Engine's layers in bfloat16; needs one GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trainer_jobs import GPU, Setting, make_batch, resume, save_after_two_steps, three_steps
from trainer_ranks import Ranks
from transformers import AutoModelForCausalLM

from areal_like.config.schema import OptimizerConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def one_rank():
    pool = Ranks(1)
    yield pool
    pool.close()


def setting(model, bridge="mbridge") -> Setting:
    return Setting(model, bridge=bridge, machine=GPU, optimizer=OptimizerConfig(lr=1e-3, eps=1e-2))


@pytest.mark.parametrize("bridge", ["mbridge", "megatron-bridge"])
@pytest.mark.parametrize("model", ["tied", "untied", "moe"])
def test_log_probs_are_hugging_faces_up_to_bfloat16(one_rank, models, model, bridge):
    batch, outcome = make_batch(), one_rank.run(three_steps, 1, setting(models[model], bridge))[0]
    hf = AutoModelForCausalLM.from_pretrained(models[model], dtype=torch.float32)
    places, values = outcome.log_probs
    got = np.zeros(len(batch.tokens))
    got[places] = values
    start, differences = 0, []
    for tokens in torch.from_numpy(batch.tokens).long().split(batch.lengths.tolist()):
        with torch.no_grad():
            expected = torch.log_softmax(hf(tokens[None]).logits[0] / 0.7, -1)[:-1].gather(1, tokens[1:, None])[:, 0]
        differences.append(got[start + 1 : start + len(tokens)] - expected.numpy())
        start += len(tokens)
    differences = np.concatenate(differences)
    assert np.abs(differences).mean() < 0.03
    assert np.abs(differences).max() < 0.5
    assert all(np.isfinite(step["grad_norm"]) for step in outcome.steps)
    assert outcome.weights.keys() == load_file(models[model] / "model.safetensors").keys()


@pytest.mark.parametrize("model", ["tied", "moe"])
def test_a_checkpoint_continues_the_run(one_rank, models, model, tmp_path):
    expected = one_rank.run(save_after_two_steps, 1, setting(models[model]), tmp_path)[0][0]
    steps = one_rank.run(resume, 1, setting(models[model]), tmp_path)[0]
    assert steps[0] == pytest.approx(expected, rel=1e-3)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert hf.dtype == torch.bfloat16
