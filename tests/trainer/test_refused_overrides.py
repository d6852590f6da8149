"""What Megatron-core's TransformerConfig refuses of overrides that are right one by one."""

from __future__ import annotations

from typing import Any

import pytest

from allocation import ParallelSizes, load_model
from allocation.model_spec import known_models
from areal_like.backends.megatron.cpu import cuda as cpu
from areal_like.backends.megatron.refusals import Asked, judge
from areal_like.core.config.schema import EngineConfig, MegatronConfig
from areal_like.preflight.overrides import shape_of

cpu.install()


def asked(model: str, overrides: dict[str, Any], sizes: ParallelSizes | None = None, **megatron: Any) -> Asked:
    engine = EngineConfig(megatron=MegatronConfig(override_transformer_config=overrides, **megatron))
    return Asked(engine=engine, sizes=sizes or ParallelSizes(), shape=shape_of(load_model(model)), device="cpu")


@pytest.mark.parametrize("model", known_models())
def test_megatron_takes_every_family_as_the_trainer_has_it(model):
    assert judge(asked(model, {"attention_softmax_in_fp32": True})).words is None
    assert "together with fp8" in str(judge(asked(model, {"fp8_output_proj": True})).words)


@pytest.mark.parametrize(
    ("overrides", "words", "one_too_many"),
    [
        ({"fp8_output_proj": True}, "together with fp8", ["fp8_output_proj"]),
        ({"moe_paged_stash": True}, "moe_expert_rank_capacity_factor to be set", None),
        (
            {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": 0.1},
            "a list of the same length",
            [],
        ),
        ({"attention_softmax_in_fp32": True, "fp8_output_proj": True}, "together with fp8", None),
    ],
)
def test_what_is_refused_names_what_to_leave_out(overrides, words, one_too_many):
    verdict = judge(asked("qwen3-30b-a3b", overrides))
    assert words in str(verdict.words)
    assert verdict.one_too_many == ([list(overrides)[-1]] if one_too_many is None else one_too_many)


def test_settings_beside_the_overrides_count():
    chosen = {"recompute_granularity": "selective", "recompute_modules": ["shared_experts"]}
    verdict = judge(asked("deepseek-v3", {"moe_shared_expert_overlap": True}, **chosen))
    assert "shared_experts" in str(verdict.words)
    assert verdict.one_too_many == ["moe_shared_expert_overlap"]
    assert judge(asked("deepseek-v3", {"moe_shared_expert_overlap": True})).words is None
