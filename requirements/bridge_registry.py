"""Writes what the pinned bridges register and what transformers fills in for a family: part of `make lock`.

The checks before a run read that table, areal_like/backends/megatron/bridges/registry.json, without importing any of
the three libraries.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from allocation.model_spec import FAMILIES
from areal_like.backends.megatron.cpu import cuda as cpu
from areal_like.data.model_types import register_model_types

FILE = Path(__file__).parents[1] / "areal_like/backends/megatron/bridges/registry.json"


def registry() -> dict[str, Any]:
    """Per bridge what it registers: mbridge model types, Megatron Bridge architectures; per family its config."""
    cpu.install()
    register_model_types()
    from mbridge import AutoBridge as MBridge
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    from areal_like.backends.megatron.bridges.megatron_bridge import AutoBridge as MegatronBridge

    architectures = {**CAUSAL, "kimi_k2": CAUSAL["deepseek_v3"]}
    families = [name for name in FAMILIES if name in CONFIG_MAPPING and name in architectures]
    return {
        "versions": {name: version(name) for name in ("mbridge", "megatron-bridge", "transformers")},
        "mbridge": sorted(MBridge.list_supported_models()),
        "megatron-bridge": sorted(MegatronBridge.list_supported_models()),
        "families": {
            name: {"architecture": architectures[name], "defaults": _defaults(CONFIG_MAPPING[name]())}
            for name in families
        },
    }


def _defaults(config: Any) -> dict[str, Any]:
    """The family's own fields, without those that every config has."""
    from transformers import PretrainedConfig

    common = PretrainedConfig().to_dict().keys() | {"rope_parameters"}
    values = {name: value for name, value in config.to_dict().items() if name not in common}
    return {name: value for name, value in sorted(values.items()) if not isinstance(value, list | dict) or not value}


if __name__ == "__main__":
    FILE.write_text(json.dumps(registry(), indent=1) + "\n")
