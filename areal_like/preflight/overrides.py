"""Overrides of Megatron's TransformerConfig, tried on it: what they go with is known there alone."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from allocation import Finding, Plan, Severity
from allocation.model_spec import ModelSpec
from areal_like.config.findings import finding
from areal_like.config.schema import RunConfig, TrainerRole
from areal_like.trainer.megatron.refusals import Asked, Verdict
from areal_like.types import Device

_SECTION = "megatron.override_transformer_config"


def try_overrides(
    config: RunConfig, device: Device, specs: Mapping[TrainerRole, ModelSpec | None], plan: Plan
) -> Iterator[Finding]:
    """Try overrides together on Megatron-core, which takes ten seconds; yield what it refuses."""
    asked_before: list[Asked] = []
    for role, engine in config.roles.items():
        spec, of_role, own = specs.get(role), plan.engine(role), config.further_roles.get(role)
        if spec is None or of_role.backend != "megatron" or not engine.megatron.override_transformer_config:
            continue
        asked = Asked(engine=engine, sizes=of_role.sizes, shape=shape_of(spec), device=device)
        if asked not in asked_before:
            yield from _find(asked, f"{'actor' if own and own.megatron is None else role}.{_SECTION}")
        asked_before.append(asked)


def _find(asked: Asked, key: str) -> Iterator[Finding]:
    status, said, errors = _answer(asked.model_dump_json())
    if status:
        message = f"could not be tried on Megatron-core's TransformerConfig: {errors.strip().rpartition(chr(10))[2]}"
        yield finding("RUN-MEGATRON-UNTRIED", key, message, severity=Severity.WARNING)
        return
    verdict = Verdict.model_validate_json(said.splitlines()[-1])
    if verdict.words:
        one, every = verdict.one_too_many, list(asked.engine.megatron.override_transformer_config)
        help = f"leave out {' or '.join(one) or ' and '.join(every)}"
        message = f"Megatron-core refuses it: {verdict.words}"
        yield finding("RUN-MEGATRON-REFUSED", f"{key}.{(one or every)[0]}", message, help)


@cache
def _answer(asked: str) -> tuple[int, str, str]:
    """Exit status, what it printed, and its errors."""
    command = [sys.executable, "-m", "areal_like.trainer.megatron.refusals"]
    done = subprocess.run(command, input=asked, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def shape_of(spec: ModelSpec) -> dict[str, Any]:
    """Fields of TransformerConfig that follow from a model."""
    shape: dict[str, Any] = {
        "num_layers": spec.layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn,
        "num_attention_heads": spec.heads,
        "num_query_groups": spec.kv_heads,
        "kv_channels": spec.head_dim,
        "qk_layernorm": bool(spec.qk_norm),
        "multi_latent_attention": spec.latent_attention,
    }
    if spec.experts:
        shape |= {
            "num_moe_experts": spec.experts,
            "moe_ffn_hidden_size": spec.expert_ffn,
            "moe_router_topk": spec.experts_per_token,
            "moe_shared_expert_intermediate_size": spec.shared_ffn or None,
        }
    return shape
