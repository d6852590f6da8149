"""A prompt that is computed once for its responses: in every family the same numbers as one for each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny_models import FSDP_DENSE, FSDP_EXPERTS, FSDP_OTHERS
from tolerance import SEQUENCE, assert_close, assert_gradient, close_to
from trainer_jobs import Setting, make_groups, step_with_trees, weighted

from areal_like.core.types import LossSpec

pytestmark = pytest.mark.covers("shared prompts")

LONG = pytest.mark.long
WITH_STATES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # refused
SOON = ("deepseek_v3-yarn", "qwen2-window", "gemma2")
LATER = ("minimax_m2-partial", "kimi_k2", "gpt_oss", "gemma3_text-window", "deepseek_v2", "glm4_moe_lite", "olmoe")
BY_EITHER_BRIDGE = ("qwen3_moe", "glm4_moe")
MEGATRON = [
    *((name, "megatron-bridge") for name in SOON),
    ("mixtral", "mbridge"),
    *(pytest.param(name, "megatron-bridge", marks=LONG) for name in (*LATER, *BY_EITHER_BRIDGE)),
    *(pytest.param(name, "mbridge", marks=LONG) for name in (*BY_EITHER_BRIDGE, "qwen2_moe")),
]
UNDER_FSDP = ("mixtral", "deepseek_v3", "gpt_oss")
LATER_UNDER_FSDP = [
    name for name in (*FSDP_EXPERTS, *FSDP_DENSE, *FSDP_OTHERS) if name not in (*WITH_STATES, *UNDER_FSDP)
]


def train_alike(ranks, setting: Setting) -> None:
    """Assert that log-probs and the gradients of a step are those of a prompt for each response."""
    batch, loss = make_groups(), LossSpec(weighted)
    whole, shared = (
        ranks.run(step_with_trees, 1, replace(setting, share_prompts=it), batch, loss)[0] for it in (False, True)
    )
    trained = batch.fields["loss_mask"] > 0
    by_place = [np.full(len(trained), np.nan), np.full(len(trained), np.nan)]
    for values, outcome in zip(by_place, (whole, shared), strict=True):
        values[outcome.log_probs[0]] = outcome.log_probs[1]
    assert_close(by_place[1], by_place[0], depth=SEQUENCE)
    assert np.isfinite(by_place[0][trained]).all()
    assert shared.steps == [close_to(step) for step in whole.steps]
    for key, gradient in whole.weights.items():
        assert_gradient(shared.weights[key], gradient, err_msg=key)


@pytest.mark.parametrize(("name", "bridge"), MEGATRON)
def test_responses_train_alike_on_megatron(ranks, tiny, name, bridge):
    train_alike(ranks, Setting(tiny(name), bridge=bridge))


@pytest.mark.parametrize("name", [*UNDER_FSDP, *(pytest.param(name, marks=LONG) for name in LATER_UNDER_FSDP)])
def test_responses_train_alike_under_fsdp(ranks, tiny, name):
    train_alike(ranks, Setting(tiny(name), backend="fsdp"))
