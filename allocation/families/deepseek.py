"""DeepSeek V2, V3 and V3.2, and Kimi K2, all with latent attention."""

from dataclasses import replace
from typing import Any

from allocation.families import ONE_ROPE, Family, Fsdp, Megatron, ServedFamily

_LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_SIGMOID = {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",), "norm_topk_prob": (True,)}


def _options(config: Any) -> dict[str, Any]:
    """Return options without layers for multi-token prediction, which are not used, and without a single group."""
    options = {"rope_type": "rope", "mtp_num_layers": None}
    grouped = (config.n_group or 1) > 1
    return options if grouped else options | {"moe_router_num_groups": None, "moe_router_group_topk": None}


LIKE_DEEPSEEK = Megatron(
    _SIGMOID, ("default", "yarn"), several_experts=True, trains_mtp=True, router_biases=True, options=_options
)
DEEPSEEK = Family(
    "n_routed_experts",
    "moe_intermediate_size",
    "",
    "n_shared_experts",
    latent_attention=True,
    bias="qkvo",
    defaults=_LATENT | {"first_k_dense_replace": 3},
    megatron=LIKE_DEEPSEEK,
    fsdp=Fsdp(packs_experts=True),
    server=ServedFamily(on_cpus=False, adapters=True),
)
FAMILIES = {
    "deepseek_v2": replace(
        DEEPSEEK,
        defaults=_LATENT | {"first_k_dense_replace": 0},
        megatron=Megatron(
            {
                "topk_method": ("greedy",),
                "n_group": (None, 1),
                "topk_group": (None, 1),  # transformers 5.12 cannot
                "norm_topk_prob": (False,),  # transformers ignores it, SGLang does not
            },
            ONE_ROPE,  # transformers leaves YaRN's factor out of the softmax's scale, SGLang does not
            several_experts=True,
            options=_options,
        ),
    ),
    # mbridge 0.15.1 sets fields that megatron-core 0.19.2 does not have
    "deepseek_v3": replace(DEEPSEEK, megatron=replace(LIKE_DEEPSEEK, unusable=("mbridge",))),
    "deepseek_v32": replace(
        DEEPSEEK,
        defaults={**DEEPSEEK.defaults, "index_n_heads": 64, "index_head_dim": 128},
        megatron=None,
        fsdp=Fsdp(not_packed="its sparse attention selects keys of other sequences in a pack"),
        server=ServedFamily(),
    ),
    "kimi_k2": DEEPSEEK,
}
