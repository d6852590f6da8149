"""Families of models by `model_type`: how their configs differ from each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """A family's names of the config fields about experts; `experts` is empty for a dense one.

    `bias` are the attention projections that `attention_bias` covers, `norms` the norms of a layer, `defaults` the
    values that transformers' configuration class uses for keys that a config omits. If the config does not list the
    kinds of layers, all but every `full_every`-th attend to a window; 0: none do, 1: all do, if there is a window.
    """

    experts: str = ""
    expert_ffn: str = ""
    shared_ffn: str = ""
    shared_experts: str = ""
    expert_bias: bool = False
    latent_attention: bool = False
    linear_attention: bool = False
    qk_norm: str = ""
    bias: str = ""
    norms: int = 2
    full_every: int = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)


USUAL = Family(bias="qkvo")  # of an unknown dense model
_BIAS = {"attention_bias": True}
_MLA = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_GLM_MLA = {"q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}
_DEEPSEEK = Family(
    "n_routed_experts", "moe_intermediate_size", "", "n_shared_experts", latent_attention=True, bias="qkvo",
    defaults=_MLA | {"first_k_dense_replace": 3},
)  # fmt: skip
_SPARSE = replace(_DEEPSEEK, defaults={**_DEEPSEEK.defaults, "index_n_heads": 64, "index_head_dim": 128})
_GLM = Family(bias="qkv", defaults={"head_dim": 128})
_QWEN2 = Family(bias="qkv", defaults=_BIAS)
_QWEN3 = Family(bias="qkvo", qk_norm="head", defaults={"head_dim": 128})
_EVERY_LAYER = {"decoder_sparse_step": 1}
_QWEN3_MOE = Family("num_experts", "moe_intermediate_size", bias="qkvo", qk_norm="head", defaults=_EVERY_LAYER)
_QWEN_SHARED = ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size")
_DELTA_NETS = Family(
    *_QWEN_SHARED, linear_attention=True, bias="qkvo", qk_norm="head",
    defaults={"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
              "linear_conv_kernel_dim": 4, "full_attention_interval": 4},
)  # fmt: skip
_GEMMA = Family(bias="qkvo", defaults={"head_dim": 256, "tie_word_embeddings": True})
# Fields that Google's checkpoints omit
_GEMMA_2 = {
    **_GEMMA.defaults, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256_000,
    "max_position_embeddings": 8192, "sliding_window": 4096,
}  # fmt: skip
_GEMMA_3 = _GEMMA_2 | {"vocab_size": 262_208, "max_position_embeddings": 131_072}
FAMILIES: dict[str, Family] = {
    "llama": Family(bias="qkvo"),
    "mistral": Family(full_every=1),
    **dict.fromkeys(("qwen2", "mimo", "qwen2_vl_text", "qwen2_5_vl_text"), _QWEN2),
    **dict.fromkeys(("qwen3", "qwen3_vl_text"), _QWEN3),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, norms=4, full_every=2, defaults=_GEMMA_2 | {"attn_logit_softcapping": 50.0}),
    "gemma3_text": replace(_GEMMA, norms=4, qk_norm="head", full_every=6, defaults=_GEMMA_3),
    "glm": _GLM,
    "glm4": replace(_GLM, norms=4),
    "olmo2": Family(bias="qkvo", qk_norm="full"),
    "olmo3": Family(bias="qkvo", qk_norm="full", full_every=4, defaults={"sliding_window": 4096}),
    "smollm3": Family(bias="qkvo", defaults={"tie_word_embeddings": True}),
    "seed_oss": Family(bias="qkv", defaults=_BIAS | {"head_dim": 128}),
    "phi3": Family(full_every=1),
    "exaone4": Family(qk_norm="head", full_every=4),
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe_text": _QWEN3_MOE,
    "qwen2_moe": Family(*_QWEN_SHARED, bias="qkv", defaults=_BIAS | _EVERY_LAYER),
    "qwen3_next": replace(_DELTA_NETS, defaults={**_DELTA_NETS.defaults, **_EVERY_LAYER}),
    "qwen3_5_text": Family(linear_attention=True, bias="qkvo", qk_norm="head", defaults=_DELTA_NETS.defaults),
    "qwen3_5_moe_text": replace(_DELTA_NETS, defaults={**_DELTA_NETS.defaults, "intermediate_size": 5632}),  # of no layer
    "olmoe": Family("num_experts", "intermediate_size", bias="qkvo", qk_norm="full"),
    "mixtral": Family("num_local_experts", "intermediate_size", full_every=1),
    "minimax_m2": Family("num_local_experts", "intermediate_size", qk_norm="full", defaults={"head_dim": 128}),
    "gpt_oss": Family("num_local_experts", "intermediate_size", expert_bias=True, bias="qkvo",
                      full_every=2, defaults=_BIAS | {"head_dim": 64, "sliding_window": 128}),
    "deepseek_v2": replace(_DEEPSEEK, defaults=_MLA | {"first_k_dense_replace": 0}),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _SPARSE,
    "kimi_k2": _DEEPSEEK,
    "glm4_moe_lite": replace(_DEEPSEEK, defaults=_GLM_MLA | {"first_k_dense_replace": 1}),
    "glm4_moe": Family("n_routed_experts", "moe_intermediate_size", "", "n_shared_experts", bias="qkv", qk_norm="head",
                       defaults={"first_k_dense_replace": 1, "head_dim": 128}),
}  # fmt: skip
_NOT_UNDER_FSDP = ("mimo", "olmo3", "deepseek_v32")
# Families whose models runs of areal-like train, by backend (areal_like/backends/megatron/bridges/support.py)
TRAINED = {
    "megatron": (
        "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe",
        "deepseek_v2", "deepseek_v3", "minimax_m2", "kimi_k2", "glm4_moe_lite", "gemma2", "gemma3_text",
        "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gpt_oss",
    ),
    "fsdp": tuple(name for name in FAMILIES if "_vl_" not in name and name not in _NOT_UNDER_FSDP),
}  # fmt: skip
