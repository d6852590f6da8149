"""Every field of Megatron-core's TransformerConfig, overridden alone: the model stays Hugging Face's, or is refused."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch.distributed as dist
from tolerance import BACKWARD, magnitude_of, rounding
from trainer_jobs import Setting, engine, make_batch

from allocation import ParallelSizes
from areal_like.backends.megatron import parallel
from areal_like.backends.megatron.bridges.support import BRIDGES
from areal_like.backends.megatron.options import TABLE
from areal_like.backends.options import Option, read_options
from areal_like.core.algorithms.losses import sft
from areal_like.core.trainer.engine import Rendezvous
from areal_like.core.types import LossSpec

# isort: split
from megatron.core.transformer import TransformerConfig

LENGTHS = (48, 17, 9, 30, 3, 12, 8, 21)
ONE = ParallelSizes()
N_PARTS = 9  # of a sweep
PARTS = (0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, N_PARTS)))
_OF_THE_OBJECTIVE = {"moe_z_loss_coeff"}  # what a gradient is meant to change with
OVERRIDES = "actor.megatron.override_transformer_config"
# Texts that Megatron-core knows, of which its annotations say only that they are texts
_TEXTS = {
    "moe_router_load_balancing_type": [
        *("none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "abc"),
        *(["aux_loss"], ["sinkhorn"]),
    ],
    "cp_comm_type": ["p2p", "all_gather", "a2a", "a2a+p2p"],
    "pipeline_model_parallel_layout": ["Ettt|L", "E|t*2|L"],
    "offload_modules": [["attn_norm"], ["core_attn"]],
}
_OF_KIND: Mapping[str, list[Any]] = {
    "true or false": [True, False],
    "a whole number": [2, 1, 4, 0],
    "a number": [0.25, 1.0, 2.0, 0.0],
    "text": ["abc"],
    "a list of strings": [["abc"]],
    "a list of whole numbers": [[1, 1]],
    "a list of numbers": [[0.5]],
    "a list of 2": [[1, 2]],
    "a list": [[1]],
}


def values_of(name: str, option: Option) -> Iterator[Any]:
    """Values that have the option's type, null aside, which leaves things as they are."""
    yield from _TEXTS.get(name, [value for kind in option.types for value in _OF_KIND.get(kind, [])])
    yield from option.choices


def overrides() -> list[dict[str, Any]]:
    return [{name: value} for name, option in read_options(TABLE).items() for value in values_of(name, option)]


def first_of_each(every: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One value of each field, as far as it is not Megatron's own."""
    defaults = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    others = (override for override in every for name, value in override.items() if getattr(defaults, name) != value)
    return list({next(iter(override)): override for override in reversed(list(others))}.values())


def log_probs_and_step(
    rendezvous: Rendezvous, listener: socket.socket, setting: Setting
) -> tuple[Any, dict[str, float]] | str:
    """Log-probs of a batch and a training step, or why there are none."""
    batch = make_batch(lengths=LENGTHS)
    try:
        with engine(rendezvous, listener, setting) as made:
            everything = replace(batch, fields={})  # without a mask no token is left out
            return made.log_probs(everything), made.train(batch, LossSpec(sft))
    except Exception as error:  # noqa: BLE001  # whatever ends an engine is what the sweep looks for
        if dist.is_initialized():
            parallel.shutdown()
        return f"{type(error).__name__}: {error}"


def wrong(ranks, checks, model: Path, bridge: str, sizes: ParallelSizes, each: list[dict[str, Any]]) -> dict[str, str]:
    """The overrides that are let through and do not start, or compute or train another model, and what they do."""
    layout = f"actor.backend=megatron:(attn:d{sizes.dp}t{sizes.tp}p{sizes.pp}|ffn:d{sizes.edp}t{sizes.etp}p{sizes.pp}e{sizes.ep})"
    world, outcomes = sizes.dp * sizes.tp * sizes.pp, {}
    for override in [{}, *each]:
        assigned = [f"{OVERRIDES}.{name}={json.dumps(value)}" for name, value in override.items()]
        if checks.errors(model, layout, f"actor.megatron.bridge_type={bridge}", *assigned):
            continue
        setting = Setting(model, sizes, bridge, megatron={"override_transformer_config": override})
        outcomes[json.dumps(override)] = ranks.run(log_probs_and_step, world, setting)
    expected = outcomes.pop("{}")
    return {name: found for name, outcome in outcomes.items() if (found := _difference(name, outcome, expected))}


def _difference(override: str, outcome: list, expected: list) -> str | None:
    if errors := [each for each in outcome if isinstance(each, str)]:
        return errors[0]
    for (found, step), (log_probs, first) in zip(outcome, expected, strict=True):
        if log_probs is not None and not np.allclose(
            found[1], log_probs[1], rtol=0, atol=rounding(magnitude_of(log_probs[1]))
        ):
            return f"log-probs differ by {np.abs(found[1] - log_probs[1]).max()}"
        if not _OF_THE_OBJECTIVE & json.loads(override).keys() and not np.isclose(
            step["grad_norm"], first["grad_norm"], rtol=rounding(depth=BACKWARD), atol=0
        ):
            return f"the gradient's norm is {step['grad_norm']}, not {first['grad_norm']}"
    return None


@pytest.mark.parametrize("part", PARTS)
def test_a_value_of_every_field_leaves_the_model_as_it_is_or_is_refused(ranks, checks, tmp_path, part):
    tiny_models.write_tiny(tiny_models.VARIANTS["glm4_moe"], tmp_path)  # dense layers, experts, shared ones and biases
    assert wrong(ranks, checks, tmp_path, "mbridge", ONE, first_of_each(overrides())[part::N_PARTS]) == {}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "bridge"),
    [
        *((name, bridge) for name in ("glm4_moe", "qwen3_moe", "qwen3") for bridge in BRIDGES),
        ("qwen2_moe", "mbridge"),
        ("olmoe", "megatron-bridge"),
    ],
    ids=str,
)
def test_every_value_leaves_the_model_as_it_is_or_is_refused(ranks, checks, tmp_path, name, bridge):
    tiny_models.write_tiny(tiny_models.VARIANTS[name], tmp_path)
    assert wrong(ranks, checks, tmp_path, bridge, ONE, overrides()) == {}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "sizes"), [("glm4_moe", ParallelSizes(tp=2, ep=2)), ("qwen3", ParallelSizes(pp=2))], ids=str
)
def test_a_value_of_every_field_does_so_on_two_ranks(ranks, checks, tmp_path, name, sizes):
    tiny_models.write_tiny(tiny_models.VARIANTS[name], tmp_path)
    assert wrong(ranks, checks, tmp_path, "mbridge", sizes, first_of_each(overrides())) == {}


def test_the_sweep_has_a_value_of_every_field():
    names = {name for override in overrides() for name in override}
    options = read_options(TABLE)
    assert len(options) == 306
    assert {"a function", "a Python object"} >= {
        kind for name in options.keys() - names for kind in options[name].types
    } - {"null"}
