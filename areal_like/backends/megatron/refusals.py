"""Megatron-core's own check of a user's overrides, in a separate process, because it needs torch.

    python -m areal_like.backends.megatron.refusals < asked.json

reads an `Asked` and prints a `Verdict`, both as JSON.
"""

from __future__ import annotations

import sys
from typing import Any

from pydantic import BaseModel

from allocation.plan import ParallelSizes
from areal_like.backends.megatron.options import layout_options, transformer_options
from areal_like.core.config.schema import EngineConfig


class Asked(BaseModel):
    """A role's settings and layout; `shape` has the fields of TransformerConfig that follow from the model."""

    engine: EngineConfig
    sizes: ParallelSizes
    shape: dict[str, Any]
    device: str


class Verdict(BaseModel):
    """Megatron's message about the overrides, None if there is none, and the overrides whose removal would fix it."""

    words: str | None
    one_too_many: list[str]


def judge(asked: Asked) -> Verdict:
    """Check overrides; ignore errors that also occur without overrides.

    For example, a run for GPUs may be checked on a machine without Transformer Engine.
    """
    overrides = asked.engine.megatron.override_transformer_config
    anyway, words = _refusal(asked, {}), _refusal(asked, overrides)
    if words == anyway:
        return Verdict(words=None, one_too_many=[])
    fewer = {name: {other: overrides[other] for other in overrides if other != name} for name in overrides}
    return Verdict(words=words, one_too_many=[name for name, left in fewer.items() if _refusal(asked, left) == anyway])


def _refusal(asked: Asked, overrides: dict[str, Any]) -> str | None:
    import torch
    import torch.nn.functional as F
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    sizes = asked.sizes
    megatron = asked.engine.megatron.model_copy(update={"override_transformer_config": overrides})
    engine = asked.engine.model_copy(update={"megatron": megatron})
    kind = MLATransformerConfig if asked.shape.get("multi_latent_attention") else TransformerConfig
    options = {
        **layout_options(sizes, getattr(torch, asked.engine.dtype)),
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        **asked.shape,
    }
    try:
        given = transformer_options(engine, device=asked.device, pipelined=sizes.pp > 1, interleaved=sizes.vpp > 1)
        kind(**{**options, **given})
    except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}" if isinstance(error, KeyError) or not str(error) else str(error)
    return None


if __name__ == "__main__":
    from areal_like.backends.megatron.cpu import cuda as cpu

    cpu.install()
    print(judge(Asked.model_validate_json(sys.stdin.read())).model_dump_json())
