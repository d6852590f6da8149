"""Qwen3-Next and the language models of Qwen3.5, with gated delta nets."""

from typing import Any

from allocation.families.family import GATED_SHARED_EXPERT, ONE_ROPE, Family, Fsdp, Megatron, Server

_EXPERTS = ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size")
_DEFAULTS = {
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
_ROTARY = {"partial_rotary_factor": (None, 0.25)}
_SERVED = Server(on_cpus=False)


def _options(config: Any) -> dict[str, Any]:
    """Return which layers are gated delta nets; a bridge would take every fourth for one that is not."""
    return {
        "linear_attention_freq": [int(kind == "linear_attention") for kind in config.layer_types],
        "rotary_percent": config.rope_parameters.get("partial_rotary_factor", 1.0),
        "mtp_num_layers": None,
        "moe_router_pre_softmax": not getattr(config, "norm_topk_prob", True),
        **(GATED_SHARED_EXPERT if config.model_type != "qwen3_5_text" else {}),
    }


def _delta_nets(*experts: str, images: bool = False, **defaults: int) -> Family:
    return Family(
        *experts,
        linear_attention=True,
        bias="qkvo",
        qk_norm="head",
        defaults=_DEFAULTS | defaults,
        megatron=Megatron(_ROTARY, ONE_ROPE, several_experts=bool(experts), options=_options),
        fsdp=Fsdp(packs_experts=bool(experts), sees_images=images),
        server=_SERVED,
    )


FAMILIES = {
    "qwen3_next": _delta_nets(*_EXPERTS, decoder_sparse_step=1),
    "qwen3_5_text": _delta_nets(images=True),
    "qwen3_5_moe_text": _delta_nets(*_EXPERTS, images=True, intermediate_size=5632),  # of no layer
}
