"""Which models' attention the FSDP trainer computes itself, by their `config.json`. No torch: preflight asks too."""

from collections.abc import Mapping
from typing import Any

_LAYERS = {"full_attention", "sliding_attention"}


def has_plain_attention(config: Mapping[str, Any]) -> bool:
    """Whether every layer attends to all tokens before, or to the last of them, without a cap on the scores."""
    capped = config.get("attn_logit_softcapping")
    return not capped and set(config.get("layer_types") or _LAYERS) <= _LAYERS
