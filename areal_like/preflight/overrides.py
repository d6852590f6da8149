"""Tries overrides on Megatron's TransformerConfig, which alone knows the valid combinations."""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from allocation.diagnostics import Finding, Severity
from allocation.model_spec import ModelSpec
from areal_like.config.findings import finding
from areal_like.preflight.view import RoleView
from areal_like.trainer.megatron.refusals import Asked, Verdict

_SECTION = "megatron.override_transformer_config"


def try_overrides(views: Iterable[RoleView]) -> Iterator[Finding]:
    """Try overrides together on Megatron-core, which takes ten seconds; yield its errors."""
    asked_before: list[Asked] = []
    for view in views:
        overrides, layout = view.engine.megatron.override_transformer_config, view.layout
        if view.model is None or layout is None or layout.backend != "megatron" or not overrides:
            continue
        if view.model.latent_attention and overrides.get("apply_rope_fusion"):
            message = "Megatron-core fuses the rotary embedding of latent attention only with its own YaRN"
            key = f"{view.key(_SECTION)}.apply_rope_fusion"
            yield finding("RUN-BRIDGE", key, message, "leave out apply_rope_fusion")
            continue
        asked = Asked(engine=view.engine, sizes=layout.sizes, shape=shape_of(view.model), device=view.device)
        if asked not in asked_before:
            yield from _find(asked, view.key(_SECTION))
        asked_before.append(asked)


def _find(asked: Asked, key: str) -> Iterator[Finding]:
    status, said, errors = _answer(asked.model_dump_json())
    if status:
        message = f"the overrides could not be checked with Megatron-core's TransformerConfig: {errors.strip().rpartition(chr(10))[2]}"
        yield finding("RUN-MEGATRON-REFUSED", key, message, severity=Severity.WARNING)
        return
    verdict = Verdict.model_validate_json(said.splitlines()[-1])
    if verdict.words:
        one, every = verdict.one_too_many, list(asked.engine.megatron.override_transformer_config)
        help = f"leave out {' or '.join(one) or ' and '.join(every)}"
        message = f"Megatron-core rejects the overrides: {verdict.words}"
        yield finding("RUN-MEGATRON-REFUSED", f"{key}.{(one or every)[0]}", message, help)


@cache
def _answer(asked: str) -> tuple[int, str, str]:
    """Exit status, output and errors."""
    command = [sys.executable, "-m", "areal_like.trainer.megatron.refusals"]
    done = subprocess.run(command, input=asked, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def shape_of(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of TransformerConfig that follow from a model."""
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
