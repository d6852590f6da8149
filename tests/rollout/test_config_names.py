"""A scheduler process finds the configuration fields that SGLang reads, be it forked or spawned."""

from __future__ import annotations

import multiprocessing
from functools import partial
from typing import Any

import pytest
from limits import HUNG_S

from areal_like.data.model_types import register_model_types
from areal_like.rollout.sglang.patches.config_names import PATCH


def run_patched(run: Any, *arguments: Any) -> None:
    """Run in a process to which the patch was applied, as a scheduler's."""
    PATCH.schedule(None)
    run(*arguments)


EXPECTED = {
    "gpt_oss": ("swiglu_limit", 7.0),
    "gemma2": ("hidden_act", "gelu_pytorch_tanh"),
    "deepseek_v2": ("moe_layer_freq", 1),
    "minimax_m2": ("scoring_func", "sigmoid"),
    "kimi_k2": ("topk_method", "noaux_tc"),
}


def send_values(configs: dict[str, Any], pipe: Any) -> None:
    """Run in place of SGLang's scheduler: send what the configs answer to the names, and their vocabularies."""
    for family, config in configs.items():
        name, _ = EXPECTED[family]
        pipe.send((config.model_type, config.vocab_size, getattr(config, name, None)))


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.long), "fork"])
def test_a_scheduler_process_finds_the_names(method: str) -> None:
    from transformers import CONFIG_MAPPING

    register_model_types()
    configs = {family: CONFIG_MAPPING[family](vocab_size=17 + place) for place, family in enumerate(EXPECTED)}
    context = multiprocessing.get_context(method)
    mine, other = context.Pipe()
    process = context.Process(target=partial(run_patched, send_values), args=(configs, other))
    process.start()
    other.close()
    try:
        for place, (family, (_, value)) in enumerate(EXPECTED.items()):
            assert mine.poll(HUNG_S)
            assert mine.recv() == (family, 17 + place, value)
    finally:
        process.join()


LETTERS = {
    "sliding_window_pattern": "LG",
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}
ROPE = {"rope_type": "default", "rope_theta": 7.0}
BUILT = [
    ("exaone4", "sliding_window_pattern", {}, "LLLG"),
    ("exaone4", "sliding_window_pattern", LETTERS, "LG"),
    ("exaone4", "rope_theta", {"rope_parameters": ROPE}, 7.0),
    ("qwen3_next", "rope_theta", {"rope_parameters": ROPE}, 7.0),
    ("qwen3_next", "rope_theta", {"rope_theta": 5.0}, 5.0),
    ("qwen3_next", "partial_rotary_factor", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, 0.5),
    ("deepseek_v2", "n_group", {}, 1),
    ("deepseek_v2", "n_group", {"n_group": 8}, 8),
]


def send_built(pipe: Any) -> None:
    """Run in place of SGLang's scheduler: send fields of configs that it builds itself."""
    from sglang.srt.configs.qwen3_next import Qwen3NextConfig
    from transformers import CONFIG_MAPPING

    for family, name, fields, _ in BUILT:
        kind = Qwen3NextConfig if family == "qwen3_next" else CONFIG_MAPPING[family]  # SGLang has its own
        pipe.send(getattr(kind(**fields), name))


def test_configs_that_a_scheduler_builds_have_values_that_sglang_takes() -> None:
    context = multiprocessing.get_context("fork")
    mine, other = context.Pipe()
    process = context.Process(target=partial(run_patched, send_built), args=(other,))
    process.start()
    other.close()
    try:
        for *_, expected in BUILT:
            assert mine.poll(HUNG_S)
            assert mine.recv() == expected
    finally:
        process.join()
