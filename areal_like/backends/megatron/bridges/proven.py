"""Families, fields of config.json and rotary embeddings that the table of `tests/models` proves equal. No torch."""

from __future__ import annotations

from typing import Any

DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "qwen3_5_text")
LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite")  # with latent attention
STATES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # with gated delta nets
EXPERTS = (
    *("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe", *LATENT, "minimax_m2", "gpt_oss"),
    *("qwen3_next", "qwen3_5_moe_text"),
)
FAMILIES = (*DENSE, *EXPERTS)
UNUSABLE = {"mbridge": ("deepseek_v3",)}  # mbridge 0.15.1 sets fields that megatron-core 0.19.2 does not have
NONE_OF_IT: tuple[Any, ...] = (False, None, [], 0)
SIGMOID = ("deepseek_v3", "kimi_k2", "glm4_moe_lite")  # their routers
TIED = ("gemma2", "gemma3_text")  # SGLang shares the embedding with the output layer

# Allowed values of each field; a family's own line precedes the one for all families.
ALLOWED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "gemma2.hidden_act": ("gelu_pytorch_tanh",),  # which its checkpoints name twice
    "attention_bias": NONE_OF_IT,
    "mlp_bias": NONE_OF_IT,
    "use_sliding_window": (*NONE_OF_IT, True),
    "qwen3_moe.use_sliding_window": NONE_OF_IT,  # its attention slides in every layer, its config has another value
    "qwen2_moe.use_sliding_window": NONE_OF_IT,
    "clip_qkv": (None,),
    "mlp_only_layers": NONE_OF_IT,
    "decoder_sparse_step": (1,),
    "qkv_bias": (True,),
    "quantization_config": (None,),
    "dual_chunk_attention_config": (None,),
    "partial_rotary_factor": (None, 1),
    **{f"{family}.tie_word_embeddings": NONE_OF_IT for family in EXPERTS},  # SGLang does not share them
    "olmoe.norm_topk_prob": (False,),  # SGLang never normalises there
    "glm4_moe.norm_topk_prob": (True,),
    "glm4_moe.attention_bias": (True, False),
    "glm4_moe.partial_rotary_factor": (None, 0.5),
    "deepseek_v2.topk_method": ("greedy",),  # transformers 5.12 cannot select groups
    "deepseek_v2.n_group": (None, 1),
    "deepseek_v2.topk_group": (None, 1),
    "deepseek_v2.norm_topk_prob": (False,),  # transformers ignores it, SGLang does not
    **{f"{family}.topk_method": ("noaux_tc",) for family in SIGMOID},
    **{f"{family}.scoring_func": ("sigmoid",) for family in SIGMOID},
    **{f"{family}.norm_topk_prob": (True,) for family in SIGMOID},
    "glm4_moe_lite.first_k_dense_replace": (1,),  # which transformers does not read
    **{f"{family}.tie_word_embeddings": (True,) for family in TIED},
    **{f"{family}.hidden_activation": ("gelu_pytorch_tanh",) for family in TIED},
    "use_bidirectional_attention": NONE_OF_IT,
    "gemma3_text.attn_logit_softcapping": (None,),
    "gemma3_text.final_logit_softcapping": (None,),
    "gpt_oss.attention_bias": (True,),
    "gpt_oss.swiglu_limit": (7.0,),  # transformers' own
    "rope_interleave": (True,),
    **{f"{family}.partial_rotary_factor": (None, 0.25) for family in STATES},
    "minimax_m2.scoring_func": ("sigmoid",),
    "minimax_m2.partial_rotary_factor": (None, 1, 0.5),
}
# Bridges normalise queries and keys of each rank alone (olmoe), or lose a part of the norm's gradient (minimax_m2)
ONE_TENSOR_PARALLEL_RANK = ("olmoe", "minimax_m2")
# Megatron-core leaves a single expert's weight as it is, or does not start
SEVERAL_EXPERTS_PER_TOKEN = (
    *("qwen3_moe", "mixtral", "glm4_moe", *LATENT, "minimax_m2", "gpt_oss", "qwen3_next", "qwen3_5_moe_text"),
)
SHARED_EXPERTS = {
    **dict.fromkeys(("glm4_moe", *LATENT), "n_shared_experts"),
    **dict.fromkeys(("qwen2_moe", "qwen3_next", "qwen3_5_moe_text"), "shared_expert_intermediate_size"),
}
FIXED_HEAD_DIM = ("qwen2_moe", "mixtral", "olmoe")  # SGLang divides
WINDOWS = ("mistral", "qwen2", "qwen3", "mixtral", "gemma2", "gemma3_text", "gpt_oss")
# Their layer for multi-token prediction is trained as transformers' layers would be
MTP = ("deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite")
# The fields that a rotary embedding needs, all numbers.
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
ROPE_TYPES = {
    **dict.fromkeys(("mixtral", "minimax_m2"), ("default",)),
    "glm4_moe": ("default", "linear", "llama3"),
    "deepseek_v2": ("default",),  # transformers leaves YaRN's factor out of the softmax's scale, SGLang does not
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), ("default", "yarn")),
    **dict.fromkeys(("glm4_moe_lite", "gemma2", *STATES), ("default",)),
    "gemma3_text": ("default", "linear"),
    "gpt_oss": ("yarn", "default"),
}
