"""Qwen2, Qwen2.5, their language models with images and with experts, and MiMo, which has their shape."""

from dataclasses import replace
from typing import Any

from allocation.families import (
    BIAS,
    GATED_SHARED_EXPERT,
    NONE_OF_IT,
    Family,
    Fsdp,
    Megatron,
    ServedFamily,
    softmax_order,
)


def _options(config: Any) -> dict[str, Any]:
    return softmax_order(config) | GATED_SHARED_EXPERT


_QWEN2 = Family(
    bias="qkv",
    defaults=BIAS,
    megatron=Megatron(windows=True),
    fsdp=Fsdp(splits=True),
    server=ServedFamily(adapters=True),
)
_TEXT = Family(bias="qkv", defaults=BIAS, fsdp=Fsdp(has_model=False))
FAMILIES = {
    "qwen2": _QWEN2,
    "mimo": _TEXT,
    "qwen2_vl_text": _TEXT,
    "qwen2_5_vl_text": replace(_TEXT, fsdp=Fsdp(has_model=False, sees_images=True)),
    "qwen2_moe": Family(
        "num_experts",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        bias="qkv",
        defaults={**BIAS, "decoder_sparse_step": 1},
        megatron=Megatron({"use_sliding_window": NONE_OF_IT}, divided_heads=True, options=_options),
        fsdp=Fsdp(packs_experts=True),
        server=ServedFamily(on_cpus=False, adapters=True),
    ),
}
