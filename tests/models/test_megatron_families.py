"""On Megatron a family is computed, trained and exported as transformers and autograd do it, one sequence at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_fsdp_families import LENGTHS, alone, expected_gradients
from tiny_models import LAYOUTS, TWO_RANKS, VARIANTS, hugging_face_log_probs
from tolerance import BACKWARD, SEQUENCE, assert_close, assert_gradient, close_to, depth_of
from trainer_jobs import (
    THOUSANDFOLD,
    Setting,
    adapted_steps,
    log_probs_and_weights,
    make_batch,
    updates,
)

from allocation import ParallelSizes
from areal_like.backends.fsdp.checkpoint_names import in_checkpoint
from areal_like.core.trainer.engine import LoRA

LONG = pytest.mark.long
OWN_ATTENTION = ("gemma2", "gemma3_text-window")  # windows, soft caps
DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
NAMES = (
    *("deepseek_v3-yarn", "deepseek_v2", "minimax_m2-partial", "qwen2-window", "kimi_k2", "glm4_moe_lite"),
    *("gpt_oss", "qwen3_moe", "glm4_moe", "olmoe", "mixtral", "qwen2_moe"),
    *OWN_ATTENTION,
    *DELTA_NETS,
)
SOON = ("deepseek_v3-yarn", "gemma2", "qwen3_next", "gpt_oss")
TRAINED_SOON = ("minimax_m2-partial", OWN_ATTENTION[0], DELTA_NETS[0])


def on_megatron(tiny, name: str, sizes: ParallelSizes | None = None) -> Setting:
    return Setting(tiny(name), sizes or ParallelSizes(), bridge=VARIANTS[name].bridges[-1], optimizer=THOUSANDFOLD)


def world(sizes: ParallelSizes) -> int:
    return sizes.dp * sizes.tp * sizes.pp * sizes.cp


@pytest.mark.parametrize("name", [name if name in SOON else pytest.param(name, marks=LONG) for name in NAMES])
def test_log_probs_and_weights_are_transformers_own(ranks, tiny, name):
    ((log_probs, weights),) = ranks.run(log_probs_and_weights, 1, on_megatron(tiny, name), LENGTHS)
    expected = hugging_face_log_probs(alone(tiny(name)), make_batch(lengths=LENGTHS))
    assert_close(log_probs[1], expected[log_probs[0]], depth=SEQUENCE)
    original = load_file(tiny(name) / "model.safetensors")
    assert weights.keys() == original.keys()
    for key, tensor in original.items():
        np.testing.assert_array_equal(weights[key], tensor.numpy(), err_msg=key)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *((name, ParallelSizes()) for name in TRAINED_SOON),
        *(pytest.param(name, ParallelSizes(), marks=LONG) for name in NAMES if name not in TRAINED_SOON),
        pytest.param("qwen2-window", ParallelSizes(pp=2), marks=LONG),
        pytest.param("mistral-window", ParallelSizes(tp=2, etp=2), marks=LONG),
        *(pytest.param("deepseek_v3-yarn", sizes, marks=LONG) for sizes in TWO_RANKS),
        pytest.param("deepseek_v2", ParallelSizes(tp=2, ep=2), marks=LONG),
        *(pytest.param("minimax_m2-partial", sizes, marks=LONG) for sizes in TWO_RANKS[1:]),
        *(
            pytest.param(name, sizes, marks=LONG)
            for name, sizes in LAYOUTS
            if name in ("kimi_k2", "glm4_moe_lite", "gpt_oss", *OWN_ATTENTION, *DELTA_NETS)
        ),
    ],
    ids=str,
)
def test_gradients_are_autograds_of_each_sequence_alone(ranks, tiny, name, sizes):
    model, found = alone(tiny(name)), ranks.run(updates, world(sizes), on_megatron(tiny, name, sizes), LENGTHS)[0]
    expected = {
        stored: part.numpy()
        for key, gradient in expected_gradients(tiny(name)).items()
        for stored, part in in_checkpoint(model, key, torch.from_numpy(gradient)).items()
    }
    assert found.keys() >= expected.keys()
    for key, gradient in expected.items():
        assert_gradient(found[key], gradient, depth_of(name), is_update=True, err_msg=key)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gemma2", ParallelSizes()),
        *(pytest.param("gemma2", sizes, marks=LONG) for sizes in (*TWO_RANKS[:2], TWO_RANKS[3])),
        *(pytest.param("gemma3_text-window", sizes, marks=LONG) for sizes in (ParallelSizes(), *TWO_RANKS[:2])),
        *(pytest.param("gpt_oss", sizes, marks=LONG) for sizes in (ParallelSizes(), ParallelSizes(tp=2, edp=2))),
    ],
    ids=str,
)
@pytest.mark.covers("LoRA")
def test_adapters_train_as_under_fsdp(ranks, tiny, name, sizes):
    targets = ("q_proj", "k_proj", "v_proj", "o_proj") if name == "gpt_oss" else ("all-linear",)
    setting = Setting(tiny(name), bridge="megatron-bridge", lora=LoRA(rank=4, alpha=8, targets=targets))
    (expected,) = ranks.run(adapted_steps, 1, replace(setting, backend="fsdp"))
    found = ranks.run(adapted_steps, world(sizes), replace(setting, sizes=sizes))[0]
    for step, wanted in zip(found.steps, expected.steps, strict=True):
        assert step == close_to(wanted)
    for part in ("weights", "adapters"):
        made, wanted = getattr(found, part), getattr(expected, part)
        assert made.keys() == wanted.keys()
        for key, tensor in wanted.items():
            assert_close(made[key], tensor, depth=BACKWARD, err_msg=key)
    assert sum(np.ptp(tensor) > 0 for name, tensor in expected.adapters.items() if ".lora_B." in name)
