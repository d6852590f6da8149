"""Fields of config.json that a bridge ignores or Megatron-core computes otherwise are refused, with what would do."""

from __future__ import annotations

import pytest

from allocation import ParallelSizes
from areal_like.trainer.megatron.bridges.support import bridge_problems

ONE = ParallelSizes()
HEAD = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
KINDS = {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]}


@pytest.mark.parametrize(
    ("config", "field", "words", "value"),
    [
        (
            {"model_type": "deepseek_v3", **HEAD, "v_head_dim": 32},
            "v_head_dim",
            "values have 32 dimensions, and Megatron-core truncates them to the 24",
            "24",
        ),
        ({"model_type": "deepseek_v2", "topk_group": 2}, "topk_group", "topk_group = 2", "null"),
        (
            {"model_type": "glm4_moe_lite", **KINDS, "mlp_layer_types": ["sparse"] * 3},
            "mlp_layer_types",
            'mlp_layer_types = ["sparse", "sparse", "sparse"]',
            '["dense", "sparse", "sparse"]',
        ),
        ({"model_type": "gpt_oss", "swiglu_limit": 5.0}, "swiglu_limit", "swiglu_limit = 5.0", "7.0"),
    ],
)
def test_a_field_is_refused_with_a_value_that_would_do(config, field, words, value):
    (problem,) = bridge_problems("megatron-bridge", config, ONE)
    assert (problem.field, problem.value) == (field, value)
    assert words in problem.message
    assert problem.remedy == f"use a model whose config.json has {field} = {value}"


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "deepseek_v3", **HEAD, "v_head_dim": 24},
        {"model_type": "deepseek_v2", "topk_group": 1},
        {"model_type": "glm4_moe_lite", **KINDS},
        {"model_type": "gpt_oss", "swiglu_limit": 7.0},
    ],
)
def test_what_is_computed_alike_is_trained(config):
    assert list(bridge_problems("megatron-bridge", config, ONE)) == []


@pytest.mark.parametrize("window", [128, None])
def test_sinks_are_not_computed_by_several_context_parallel_ranks(window):
    config = {"model_type": "gpt_oss", "sliding_window": window}
    (problem,) = bridge_problems("megatron-bridge", config, ParallelSizes(cp=2, edp=2))
    assert problem.field == "actor.backend"
    assert problem.remedy == "write c1 for attention"
