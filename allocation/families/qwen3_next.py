"""Qwen3-Next and the language models of Qwen3.5, with gated delta nets."""

from dataclasses import replace
from typing import Any

from allocation.families import GATED_SHARED_EXPERT, ONE_ROPE, Family, Fsdp, Megatron, ServedFamily

_DEFAULTS = {
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
_ROTARY = {"partial_rotary_factor": (None, 0.25)}


def _options(config: Any) -> dict[str, Any]:
    """Return which layers are gated delta nets; a bridge would take every fourth for one that is not."""
    return {
        "linear_attention_freq": [int(kind == "linear_attention") for kind in config.layer_types],
        "rotary_percent": config.rope_parameters.get("partial_rotary_factor", 1.0),
        "mtp_num_layers": None,
        "moe_router_pre_softmax": not getattr(config, "norm_topk_prob", True),
        **(GATED_SHARED_EXPERT if config.model_type != "qwen3_5_text" else {}),
    }


_DENSE = Family(
    linear_attention=True,
    bias="qkvo",
    qk_norm="head",
    defaults=_DEFAULTS,
    megatron=Megatron(_ROTARY, ONE_ROPE, options=_options),
    fsdp=Fsdp(sees_images=True),
    server=ServedFamily(on_cpus=False),
)
_EXPERTS = replace(
    _DENSE,
    experts="num_experts",
    expert_ffn="moe_intermediate_size",
    shared_ffn="shared_expert_intermediate_size",
    megatron=Megatron(_ROTARY, ONE_ROPE, several_experts=True, options=_options),
)
FAMILIES = {
    "qwen3_next": replace(_EXPERTS, defaults=_DEFAULTS | {"decoder_sparse_step": 1}, fsdp=Fsdp(packs_experts=True)),
    "qwen3_5_text": _DENSE,
    "qwen3_5_moe_text": replace(
        _EXPERTS,
        defaults=_DEFAULTS | {"intermediate_size": 5632},  # of no layer
        fsdp=Fsdp(packs_experts=True, sees_images=True),
    ),
}
