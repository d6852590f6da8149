"""The same engine with Transformer Engine's layers in bfloat16; needs one GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trainer_jobs import (
    GPU,
    TEMPERATURE,
    Setting,
    adapted_steps,
    critic_steps,
    make_batch,
    make_groups,
    resume,
    resumed_critic,
    save_after_two_steps,
    steps_with_groups,
    three_steps,
)
from trainer_ranks import Ranks
from transformers import AutoModelForCausalLM

from areal_like.core.config.schema import OptimizerConfig
from areal_like.core.trainer import logprobs
from areal_like.core.trainer.engine import LoRA
from areal_like.core.types import Batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def one_rank():
    pool = Ranks()
    yield pool
    pool.close()


def setting(model, bridge="mbridge") -> Setting:
    return Setting(model, bridge=bridge, machine=GPU, optimizer=OptimizerConfig(lr=1e-3, eps=1e-2))


def hf_log_probs(
    path,
    dtype,
    lora: LoRA | None = None,
    adapters: dict[str, np.ndarray] | None = None,
    batch: Batch | None = None,
) -> np.ndarray:
    batch, hf, result = batch or make_batch(), AutoModelForCausalLM.from_pretrained(path, dtype=dtype), []
    for name in [name for name in adapters or {} if ".lora_A." in name]:
        layer = hf.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
        a, b = (torch.from_numpy(adapters[other]) for other in (name, name.replace("lora_A", "lora_B")))
        layer.weight.data = (layer.weight.float() + lora.scale * b @ a).to(dtype)
    for tokens in torch.from_numpy(batch.tokens).long().split(batch.lengths.tolist()):
        with torch.no_grad():
            predicted = torch.log_softmax(hf(tokens[None]).logits[0].float() / TEMPERATURE, -1)[:-1]
        result += [torch.zeros(1), predicted.gather(1, tokens[1:, None])[:, 0]]
    return torch.cat(result).numpy()


def test_slices_of_logits_add_to_a_gradient_in_float32(monkeypatch):
    monkeypatch.setattr(logprobs, "_SLICE_ELEMENTS", 16 * 1000)
    generator = torch.Generator("cuda").manual_seed(0)
    drawn = (torch.randn(rows, 64, device="cuda", generator=generator) for rows in (100, 1000))
    hidden, weight = (it.bfloat16().requires_grad_() for it in drawn)
    labels = torch.arange(100, device="cuda")
    exact = [it.detach().double().requires_grad_() for it in (hidden, weight)]
    log_p = torch.log_softmax(exact[0] @ exact[1].t() / TEMPERATURE, -1)
    (log_p.gather(1, labels[:, None]).sum() - (log_p.exp() * log_p).sum()).backward()
    weight.main_grad = torch.zeros(1000, 64, device="cuda")

    said = {"temperature": TEMPERATURE, "vocab_size": 1000, "group": None}
    values, entropy = logprobs.log_probs_and_entropy_of_hidden(hidden, weight, labels, **said, zeros=True)
    (values + entropy).sum().backward()
    for found, tensor in ((hidden.grad, exact[0]), (weight.main_grad, exact[1])):
        assert (found - tensor.grad).norm() < 0.03 * tensor.grad.norm()  # logits are of bfloat16
    assert not weight.grad.any()


@pytest.mark.parametrize("bridge", ["mbridge", "megatron-bridge"])
@pytest.mark.parametrize("model", ["tied", "untied", "moe"])
def test_log_probs_are_as_exact_as_hugging_faces_in_bfloat16(one_rank, models, model, bridge):
    outcome = one_rank.run(three_steps, 1, setting(models[model], bridge))[0]
    exact, rounded = hf_log_probs(models[model], torch.float32), hf_log_probs(models[model], torch.bfloat16)
    places, values = outcome.log_probs
    assert np.abs(values - exact[places]).mean() < 1.5 * np.abs(rounded - exact)[places].mean()
    assert all(np.isfinite(step["grad_norm"]) for step in outcome.steps)
    assert outcome.weights.keys() == load_file(models[model] / "model.safetensors").keys()


def test_fsdp_sees_the_windows_that_hugging_face_does(one_rank, models):
    """With sliding windows, biases and fewer key heads."""
    (outcome,) = one_rank.run(three_steps, 1, replace(setting(models["sliding"]), backend="fsdp"))
    exact, rounded = (hf_log_probs(models["sliding"], dtype) for dtype in (torch.float32, torch.bfloat16))
    places, values = outcome.log_probs
    assert np.abs(values - exact[places]).mean() < 1.5 * np.abs(rounded - exact)[places].mean()
    assert all(np.isfinite(step["grad_norm"]) for step in outcome.steps)


RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


@pytest.mark.parametrize(
    ("model", "how"),
    [
        ("tied", {}),
        ("untied", {"bridge": "megatron-bridge", "megatron": RECOMPUTED}),
        ("tied", {"megatron": CORE}),
        ("moe", {}),
        ("tied", {"backend": "fsdp"}),
        ("sliding", {"backend": "fsdp", "fsdp": {"gradient_checkpointing": True}}),
    ],
    ids=str,
)
def test_responses_to_a_prompt_that_is_computed_once_train_alike(one_rank, models, model, how):
    made = replace(setting(models[model]), max_tokens_per_mb=128, **how)
    whole, shared = (one_rank.run(steps_with_groups, 1, replace(made, share_prompts=it))[0] for it in (False, True))
    exact = hf_log_probs(models[model], torch.float32, batch=make_groups())
    apart = [np.abs(values - exact[places]).mean() for places, values in (whole.log_probs, shared.log_probs)]
    assert apart[1] < 1.5 * apart[0]
    for step, wanted in zip(shared.steps, whole.steps, strict=True):
        assert step["loss"] == pytest.approx(wanted["loss"], rel=0.05, abs=0.05)
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=0.05)


PRECISE = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
SETTINGS = {
    "precision": PRECISE,
    "bfloat16-gradients": {"use_precision_aware_optimizer": True, "main_grads_dtype": "bfloat16"},
    "fp8": {"override_transformer_config": {"fp8": "hybrid"}},
    "optimizer-offload": {"optimizer_offload": True, "grad_offload": True},
}


@pytest.mark.parametrize(("model", "name"), [("tied", name) for name in SETTINGS] + [("moe", "fp8")])
def test_settings_that_take_a_gpu_train_nearly_alike(one_rank, models, model, name):
    plain = one_rank.run(three_steps, 1, setting(models[model]))[0]
    outcome = one_rank.run(three_steps, 1, replace(setting(models[model]), megatron=SETTINGS[name]))[0]
    pairs = [(step["loss"], wanted["loss"]) for step, wanted in zip(outcome.steps, plain.steps, strict=True)]
    print(model, name, pairs, [step["grad_norm"] for step in outcome.steps])
    assert all(step["skipped"] == 0 for step in outcome.steps)
    for loss, wanted in pairs[:2]:  # of the third, a policy's, little is left but rounding
        assert loss == pytest.approx(wanted, rel=0.05)


def test_a_checkpoint_of_fewer_bits_continues_the_run(one_rank, models, tmp_path):
    precise = replace(setting(models["tied"]), megatron=PRECISE)
    expected = one_rank.run(save_after_two_steps, 1, precise, tmp_path)[0][0]
    assert one_rank.run(resume, 1, precise, tmp_path)[0][0] == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("model", ["tied", "moe"])
def test_a_checkpoint_continues_the_run(one_rank, models, model, tmp_path):
    expected = one_rank.run(save_after_two_steps, 1, setting(models[model]), tmp_path)[0][0]
    steps = one_rank.run(resume, 1, setting(models[model]), tmp_path)[0]
    assert steps[0] == pytest.approx(expected, rel=1e-3)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert hf.dtype == torch.bfloat16


@pytest.mark.parametrize("megatron", [{}, PRECISE], ids=["", "precision"])
def test_a_checkpoint_continues_a_critic(one_rank, models, megatron, tmp_path):
    """Its head is float32 beside weights in bfloat16."""
    critic = replace(setting(models["tied"]), megatron=megatron)
    one_rank.run(critic_steps, 1, critic, None, tmp_path / "state")
    (resumed,), (straight,) = (one_rank.run(resumed_critic, 1, critic, at) for at in (tmp_path / "state", None))
    assert resumed == [pytest.approx(step, rel=1e-2 if megatron else 1e-3) for step in straight]


@pytest.mark.parametrize(
    ("model", "how"),
    [
        ("tied", {"bridge": "mbridge"}),
        ("untied", {"bridge": "megatron-bridge"}),
        ("untied", {"megatron": RECOMPUTED}),
        ("moe", {"bridge": "mbridge"}),
        ("tied", {"backend": "fsdp"}),
    ],
    ids=["mbridge", "megatron-bridge", "recompute", "moe", "fsdp"],
)
def test_adapters_are_trained_and_the_weights_beside_them_stay(one_rank, models, tmp_path, model, how):
    targets = ("q_proj", "k_proj", "v_proj", "o_proj") if model == "moe" else ("all-linear",)
    lora = LoRA(rank=8, alpha=16, targets=targets)
    run = replace(setting(models[model]), lora=lora, **how)
    (outcome,) = one_rank.run(adapted_steps, 1, run, tmp_path / "adapters")
    assert all(np.isfinite(step["grad_norm"]) for step in outcome.steps)
    np.testing.assert_array_equal(outcome.of_base[1], outcome.log_probs[1])
    assert outcome.trained == sum(matrix.size for matrix in outcome.adapters.values())
    exact, rounded = (
        hf_log_probs(models[model], dtype, lora, outcome.adapters) for dtype in (torch.float32, torch.bfloat16)
    )
    places, values = outcome.log_probs_after
    assert np.abs(values - outcome.log_probs[1]).mean() > 2 * np.abs(values - exact[places]).mean()
    assert np.abs(values - exact[places]).mean() < 1.5 * np.abs(rounded - exact)[places].mean()
