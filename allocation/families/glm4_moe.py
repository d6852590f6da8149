"""GLM-4.5 to 4.7 with experts, and GLM-4.7-Flash, which has latent attention."""

from dataclasses import replace
from typing import Any

from allocation.families import Family, Fsdp, Megatron, ServedFamily
from allocation.families.deepseek import DEEPSEEK, LIKE_DEEPSEEK

_LATENT = {"q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}


def _options(config: Any) -> dict[str, Any]:
    """Return options without layers for multi-token prediction, which are not used."""
    shared = config.n_shared_experts * config.moe_intermediate_size
    options = {"moe_shared_expert_intermediate_size": shared, "add_qkv_bias": config.attention_bias}
    grouped = {"moe_router_num_groups": config.n_group, "moe_router_group_topk": config.topk_group}
    return options | {"mtp_num_layers": None} | (grouped if config.n_group > 1 else {})


FAMILIES = {
    "glm4_moe": Family(
        "n_routed_experts",
        "moe_intermediate_size",
        "",
        "n_shared_experts",
        bias="qkv",
        qk_norm="head",
        defaults={"first_k_dense_replace": 1, "head_dim": 128},
        megatron=Megatron(
            {"norm_topk_prob": (True,), "attention_bias": (True, False), "partial_rotary_factor": (None, 0.5)},
            ("default", "linear", "llama3"),
            several_experts=True,
            trains_mtp=True,
            router_biases=True,
            options=_options,
        ),
        fsdp=Fsdp(packs_experts=True),
        server=ServedFamily(adapters=True),
    ),
    "glm4_moe_lite": replace(
        DEEPSEEK,
        defaults=_LATENT | {"first_k_dense_replace": 1},
        megatron=replace(
            LIKE_DEEPSEEK,
            fields={**LIKE_DEEPSEEK.fields, "first_k_dense_replace": (1,)},  # which transformers does not read
            ropes=("default",),
        ),
    ),
}
