"""The Megatron settings of a role that the allocation's rules and its memory model know."""

import os
from dataclasses import fields
from typing import Any

from allocation.settings import MegatronSettings
from areal_like.backends.megatron.options import check_overrides, recompute_modules
from areal_like.backends.training.environment import DETERMINISTIC
from areal_like.core.config.schema import EngineConfig, MegatronConfig


def megatron_settings(engine: EngineConfig) -> MegatronSettings:
    """Return the Megatron settings that the rules know; Megatron-core judges overrides that they do not know."""
    megatron = engine.megatron
    overrides = megatron.override_transformer_config
    refused = {problem.name for problem in check_overrides(overrides, device="cuda")}  # those are findings already
    known = {field.name for field in fields(MegatronSettings)}
    settings = {
        **{name: value for name, value in overrides.items() if name in known - refused},
        **{name: getattr(megatron, name) for name in MegatronConfig.model_fields if name in known},
        **_find_recomputed(megatron),
        "overlap_grad_reduce": megatron.overlap_grad_reduce is not False,
        "offload": engine.offload,
        "deterministic_mode": megatron.use_deterministic_algorithms,
        "nccl_algo": engine.env_vars.get("NCCL_ALGO") or os.environ.get("NCCL_ALGO") or DETERMINISTIC["NCCL_ALGO"],
    }
    return MegatronSettings(**settings)


def _find_recomputed(megatron: MegatronConfig) -> dict[str, Any]:
    """Return the recomputed modules; with full recomputation `preflight/megatron.py` judges them."""
    modules = megatron.recompute_modules if megatron.recompute_granularity != "full" else None
    settings = {"recompute_modules": modules or (), "moe_layer_recompute": False, **recompute_modules(megatron)}
    return {**settings, "recompute_modules": tuple(settings["recompute_modules"])}
