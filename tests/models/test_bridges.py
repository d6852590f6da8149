"""Every model is either computed as Hugging Face does, and exported as it was loaded, or refused before start."""

from __future__ import annotations

import json
import runpy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from safetensors.torch import load_file
from tolerance import SEQUENCE, assert_close
from trainer_jobs import Setting, log_probs_and_weights, make_batch

from allocation import ParallelSizes, model_spec
from allocation.families import TRAINED
from areal_like.trainer.megatron.bridges import proven
from areal_like.trainer.megatron.bridges.support import BRIDGES, bridge_problems

REGISTRY = runpy.run_path(str(Path(__file__).parents[2] / "requirements/bridge_registry.py"))
pytestmark = pytest.mark.long
LENGTHS = (48, 17, 9, 30, 3, 12, 8, 21)  # beyond the tiny models' original lengths
ONE = ParallelSizes()


@dataclass(frozen=True)
class Tiny:
    """A model on disk, and what Hugging Face makes of a batch: log-probs `[tokens]`, NaN where nothing predicts."""

    path: Path
    log_probs: np.ndarray

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.path / "config.json").read_text())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    @cache
    def make(name: str) -> Tiny:
        path = tmp_path_factory.mktemp(name)
        model, batch = tiny_models.write_tiny(tiny_models.VARIANTS[name], path), make_batch(lengths=LENGTHS)
        return Tiny(path, tiny_models.hugging_face_log_probs(model, batch))

    return make


def assert_equal(tiny: Tiny, outcomes: list) -> None:
    """Log-probs within the tolerance, each place once; weights bit by bit."""
    values = np.full(len(tiny.log_probs), np.nan)
    for places, part in (log_probs for log_probs, _ in outcomes if log_probs is not None):
        values[places] = part
    assert_close(values, tiny.log_probs, depth=SEQUENCE)
    weights = outcomes[0][1]
    original = {name: t for file in tiny.path.glob("*.safetensors") for name, t in load_file(file).items()}
    assert weights.keys() == original.keys()
    for name, tensor in original.items():
        np.testing.assert_array_equal(weights[name], tensor.numpy(), err_msg=name)


@pytest.mark.parametrize("bridge", BRIDGES)
@pytest.mark.parametrize("name", tiny_models.VARIANTS)
def test_a_model_is_computed_as_hugging_face_does_or_refused(ranks, tiny, name, bridge):
    expected = tiny_models.VARIANTS[name].bridges
    if bridge in expected:
        made = tiny(name)
        assert list(bridge_problems(bridge, made.config, ONE)) == []
        assert_equal(made, ranks.run(log_probs_and_weights, 1, Setting(made.path, bridge=bridge), LENGTHS))
    else:
        problems = list(bridge_problems(bridge, tiny_models.config_of(tiny_models.VARIANTS[name]).to_dict(), ONE))
        assert problems
        assert all(problem.field and problem.message and problem.remedy for problem in problems)


@pytest.mark.parametrize(
    ("name", "sizes"),
    tiny_models.LAYOUTS,
    ids=lambda value: value if isinstance(value, str) else str(value).removeprefix("ParallelSizes"),
)
def test_a_layout_computes_it_too(ranks, tiny, name, sizes):
    for bridge in tiny_models.VARIANTS[name].bridges:
        setting = Setting(tiny(name).path, sizes, bridge=bridge)
        assert_equal(tiny(name), ranks.run(log_probs_and_weights, 2, setting, LENGTHS))


def test_the_engine_refuses_what_the_checks_refuse(ranks, tiny):
    setting = Setting(tiny("qwen3-bias").path)
    with pytest.raises(AssertionError, match=r"attention_bias: .*use a model whose config.json has attention_bias"):
        ranks.run(log_probs_and_weights, 1, setting, LENGTHS)


@pytest.mark.parametrize("bridge", BRIDGES)
@pytest.mark.parametrize("family", sorted(model_spec.FAMILIES))
def test_every_family_is_in_the_table_or_refused(family, bridge):
    if family not in tiny_models.FAMILIES:
        assert list(bridge_problems(bridge, {"model_type": family}, ONE))


def test_the_compiler_names_the_families_that_are_trained():
    assert set(TRAINED["megatron"]) == set(proven.FAMILIES)


@pytest.mark.parametrize("bridge", BRIDGES)
@pytest.mark.parametrize("name", tiny_models.VARIANTS)
def test_what_a_problem_suggests_works(name, bridge):
    config = tiny_models.config_of(tiny_models.VARIANTS[name]).to_dict()
    for problem in bridge_problems(bridge, config, ONE):
        if problem.field == "actor.megatron.bridge_type":
            other = problem.remedy.removeprefix("write actor.megatron.bridge_type=")
            assert not [p for p in bridge_problems(other, config, ONE) if p.field in ("model_type", problem.field)]
        elif " = " in problem.remedy:
            value = problem.remedy.partition(" = ")[2].split(" or ")[0].split(",")[0]
            mended = with_field(config, problem.field, value)
            assert problem.field not in [p.field for p in bridge_problems(bridge, mended, ONE)]


def with_field(config: dict[str, Any], field: str, text: str) -> dict[str, Any]:
    section, _, name = field.rpartition(".")
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    if name == "layer_types":
        value = ["full_attention"] * config["num_hidden_layers"]
    return {**config, section: {**config[section], name: value}} if section else {**config, name: value}


@pytest.mark.parametrize(
    ("config", "bridge", "field", "words"),
    [
        ({"model_type": "glm4"}, "mbridge", "model_type", "no conversion"),
        ({"model_type": "deepseek_v32"}, "megatron-bridge", "model_type", "no conversion"),
        ({"model_type": "gpt_oss"}, "mbridge", "actor.megatron.bridge_type", "no conversion"),
        ({"model_type": "gemma2", "tie_word_embeddings": False}, "megatron-bridge", "tie_word_embeddings", "no test"),
        ({"model_type": "qwen3_next", "decoder_sparse_step": 2}, "megatron-bridge", "decoder_sparse_step", "no test"),
        ({"model_type": "mimo"}, "mbridge", "model_type", "no conversion"),
        ({"model_type": "mistral"}, "mbridge", "actor.megatron.bridge_type", "no conversion"),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForRewardModel"]}, "mbridge", "architectures", "Reward"),
        (
            {"model_type": "llama", "rope_scaling": {"type": "longrope"}},
            "mbridge",
            "rope_scaling.rope_type",
            "longrope",
        ),
        ({"model_type": "llama", "rope_scaling": {"type": "llama3"}}, "mbridge", "rope_scaling.factor", "None"),
    ],
)
def test_the_field_and_what_would_do_are_named(config, bridge, field, words):
    problem = next(iter(bridge_problems(bridge, config, ONE)))
    assert problem.field == field
    assert words in problem.message


def test_a_window_is_not_shared_by_context_parallel_ranks():
    config = {"model_type": "mistral", "sliding_window": 8}
    (problem,) = bridge_problems("megatron-bridge", config, ParallelSizes(cp=2, edp=2))
    assert problem.field == "actor.backend"
    assert not list(bridge_problems("megatron-bridge", config, ONE))
    assert not list(bridge_problems("megatron-bridge", {**config, "sliding_window": None}, ParallelSizes(cp=2, edp=2)))


def test_mbridge_names_the_layout_that_it_cannot_export():
    config = {"model_type": "qwen3_moe"}
    (problem,) = bridge_problems("mbridge", config, ParallelSizes(tp=2, edp=2))
    assert problem.remedy == "write actor.megatron.bridge_type=megatron-bridge"
    assert not list(bridge_problems("megatron-bridge", config, ParallelSizes(tp=2, edp=2)))
    assert not list(bridge_problems("mbridge", {"model_type": "qwen3"}, ParallelSizes(tp=2, edp=2)))
    (problem,) = bridge_problems("mbridge", {"model_type": "mixtral"}, ParallelSizes(tp=2, edp=2))
    assert problem.remedy == "write t2 for the experts, or add an e"
    (problem,) = bridge_problems("mbridge", {"model_type": "mixtral"}, ParallelSizes(dp=4, ep=2, etp=2))
    assert problem.remedy == "write t1 for the experts"
    assert not list(bridge_problems("mbridge", {"model_type": "mixtral"}, ParallelSizes(tp=2, etp=2)))
    (problem,) = bridge_problems("megatron-bridge", {"model_type": "olmoe"}, ParallelSizes(tp=2, etp=2))
    assert problem.field == "actor.backend"


def test_the_registry_is_current():
    assert json.loads(REGISTRY["FILE"].read_text()) == REGISTRY["registry"](), (
        "run `python requirements/bridge_registry.py`"
    )


def test_no_field_of_a_supported_family_is_overlooked():
    """A new transformers may add one that changes what is computed."""
    sizes = {
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("vocab_size", "head_dim", "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
        *("moe_intermediate_size", "shared_expert_intermediate_size", "n_shared_experts", "first_k_dense_replace"),
        *("max_position_embeddings", "rms_norm_eps", "routed_scaling_factor", "n_group", "topk_group", "use_qk_norm"),
        *("norm_topk_prob", "tie_word_embeddings", "layer_types"),
        *(
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "qk_head_dim",
            "v_head_dim",
            "topk_method",
        ),
        *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "linear_conv_kernel_dim"),
        *(f"linear_{name}" for name in ("key_head_dim", "num_key_heads", "num_value_heads", "value_head_dim")),
    }
    without_effect = {
        *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache", "pretraining_tp"),
        *("attention_dropout", "router_aux_loss_coef", "output_router_logits", "router_jitter_noise"),
        *("max_window_layers", "sliding_window", "_sliding_window_pattern"),  # without use_sliding_window
    }
    checked = {line.rpartition(".")[2] for line in proven.ALLOWED}
    families = json.loads(REGISTRY["FILE"].read_text())["families"]
    for family in proven.FAMILIES:
        assert set(families[family]["defaults"]) <= sizes | without_effect | checked, family
