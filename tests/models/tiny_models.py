"""Tiny models of every family that `allocation` knows, in the variants that occur, and the bridges that train them."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from allocation import ParallelSizes
from areal_like.core.types import Batch
from areal_like.data.model_types import register_model_types

register_model_types()

BOTH, MBRIDGE, MEGATRON_BRIDGE, NONE = ("mbridge", "megatron-bridge"), ("mbridge",), ("megatron-bridge",), ()

SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,  # small weights would hide differences
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_LINEAR = {
    **{f"linear_{name}": 16 for name in ("key_head_dim", "value_head_dim")},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
# SGLang shares the embedding with the output layer in Gemma's families, always
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}

FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "llama": ({}, BOTH),
    "mistral": ({"sliding_window": None}, MEGATRON_BRIDGE),
    "qwen2": ({}, BOTH),
    "qwen3": ({"head_dim": 16}, BOTH),
    "qwen3_moe": ({**_EXPERTS, "head_dim": 16, "norm_topk_prob": True}, BOTH),
    "qwen2_moe": ({**_EXPERTS, "shared_expert_intermediate_size": 48}, MBRIDGE),
    "mixtral": ({"num_local_experts": 4}, MBRIDGE),
    "olmoe": ({"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}, MEGATRON_BRIDGE),
    "glm4_moe": ({**_ROUTED, "head_dim": 16, "use_qk_norm": True}, BOTH),
    "gemma": ({"head_dim": 16}, NONE),
    "gemma2": ({**_GEMMA, "sliding_window": 8}, MEGATRON_BRIDGE),
    "gemma3_text": (_GEMMA, MEGATRON_BRIDGE),
    "glm": ({"head_dim": 16}, NONE),
    "glm4": ({"head_dim": 16}, NONE),
    "olmo2": ({}, NONE),
    "phi3": ({}, NONE),
    **dict.fromkeys(("olmo3", "smollm3", "seed_oss"), ({"head_dim": 16}, NONE)),
    "exaone4": ({"sliding_window": 8, "sliding_window_pattern": 2}, NONE),
    "qwen3_next": ({**_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 48}, MEGATRON_BRIDGE),
    "qwen3_5_text": (_LINEAR, MEGATRON_BRIDGE),
    "qwen3_5_moe_text": ({**_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 48}, MEGATRON_BRIDGE),
    "minimax_m2": ({"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}, MEGATRON_BRIDGE),
    "gpt_oss": (
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8},
        MEGATRON_BRIDGE,
    ),
    "deepseek_v2": ({**_ROUTED, **_LATENT, "num_key_value_heads": 4}, MEGATRON_BRIDGE),
    "deepseek_v3": ({**_ROUTED, **_LATENT, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1}, MEGATRON_BRIDGE),
    "kimi_k2": ({**_ROUTED, **_LATENT, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1}, MEGATRON_BRIDGE),
    "glm4_moe_lite": ({**_ROUTED, **_LATENT, "num_key_value_heads": 4}, MEGATRON_BRIDGE),
    "deepseek_v32": ({**_ROUTED, **_LATENT, "num_key_value_heads": 4}, NONE),
}

# Families that FSDP trains and `allocation` does not know
_MANY_EXPERTS = {**_ROUTED, "head_dim": 16, "num_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "moe_k": 2}
_PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "head_dim": 16}
COUNTED: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("granite", "stablelm", "nemotron", "arcee", "apertus", "olmo", "phi", "gpt_neox", "opt")},
    **{name: {"sliding_window": 8} for name in ("starcoder2", "cohere2")},
    **{name: {"head_dim": 16} for name in ("helium", "ernie4_5")},
    "hunyuan_v1_dense": _PLAIN_ROPE,
    "vaultgemma": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "granitemoe": {"num_local_experts": 4},
    "ernie4_5_moe": {**_MANY_EXPERTS, "moe_num_shared_experts": 1},
    "hunyuan_v1_moe": {**_MANY_EXPERTS, **_PLAIN_ROPE},
    "dots1": {**_MANY_EXPERTS, "n_group": 1, "topk_group": 1},
    "flex_olmo": _MANY_EXPERTS,
}

_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LAYERED_ROPE = {
    "rope_parameters": {
        "full_attention": {**_LINEAR_ROPE, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": _LINEAR_ROPE,
    "llama3": _LLAMA3,
    "llama3-published": {**_LLAMA3, "rope_theta": 500_000.0, "original_max_position_embeddings": 8192},
    "yarn": _YARN,
    "yarn-published": {**_YARN, "rope_theta": 1_000_000.0, "original_max_position_embeddings": 32_768},
}


@dataclass(frozen=True)
class Variant:
    """Fields of a family's config beside its tiny sizes, and the bridges that must train it; the others refuse."""

    family: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    bridges: tuple[str, ...] = NONE


VARIANTS: dict[str, Variant] = {
    **{family: Variant(family, {}, bridges) for family, (_, bridges) in FAMILIES.items()},
    **{
        f"{family}-{name}": Variant(family, {"rope_parameters": rope}, FAMILIES[family][1])
        for family in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "olmoe")
        for name, rope in ROPES.items()
    },
    **{
        f"{family}-dynamic": Variant(family, {"rope_parameters": {**_YARN, "rope_type": "dynamic"}})
        for family in ("llama", "qwen3", "qwen3_moe")
    },
    **{
        f"{family}-{name}": Variant(family, fields, FAMILIES[family][1])
        for family in ("llama", "mistral", "qwen2", "qwen3")
        for name, fields in {"tied": {"tie_word_embeddings": True}, "wide": {"head_dim": 32}}.items()
    },
    "qwen3-wide-yarn": Variant("qwen3", {"head_dim": 32, "rope_parameters": _YARN}, BOTH),
    "qwen2-yarn-mscale": Variant(
        "qwen2",
        {"rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 8, "truncate": False}},
        BOTH,
    ),
    "qwen2-yarn-attention": Variant("qwen2", {"rope_parameters": {**_YARN, "attention_factor": 1.2}}),
    "qwen2-yarn-half-mscale": Variant("qwen2", {"rope_parameters": {**_YARN, "mscale": 0.7}}),
    "qwen3-partial": Variant("qwen3", {"rope_parameters": {**_LINEAR_ROPE, "partial_rotary_factor": 0.5}}),
    "mixtral-llama3": Variant("mixtral", {"rope_parameters": _LLAMA3}),
    "glm4_moe-linear": Variant("glm4_moe", {"rope_parameters": {**_LINEAR_ROPE, "partial_rotary_factor": 0.5}}, BOTH),
    "glm4_moe-yarn": Variant("glm4_moe", {"rope_parameters": {**_YARN, "partial_rotary_factor": 0.5}}),
    "llama-bias": Variant("llama", {"attention_bias": True}),
    "llama-mlp-bias": Variant("llama", {"mlp_bias": True}),
    "llama-gelu": Variant("llama", {"hidden_act": "gelu"}),
    "qwen3-bias": Variant("qwen3", {"attention_bias": True}),
    "qwen3_moe-bias": Variant("qwen3_moe", {"attention_bias": True}),
    "qwen2-unused-window": Variant("qwen2", {"use_sliding_window": False, "sliding_window": 8}, BOTH),
    "qwen2-window": Variant("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, BOTH),
    "qwen3-window": Variant("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, BOTH),
    "qwen3_moe-window": Variant("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}),
    "mistral-window": Variant("mistral", {"sliding_window": 8}, MEGATRON_BRIDGE),
    "mixtral-window": Variant("mixtral", {"sliding_window": 8}, MBRIDGE),
    "mixtral-wide": Variant("mixtral", {"head_dim": 32}),
    "qwen3_moe-raw": Variant("qwen3_moe", {"norm_topk_prob": False}, BOTH),
    "qwen3_moe-tied": Variant("qwen3_moe", {"tie_word_embeddings": True}),
    "qwen3_moe-mlp-only": Variant("qwen3_moe", {"mlp_only_layers": [0]}),
    "qwen3_moe-sparse": Variant("qwen3_moe", {"decoder_sparse_step": 2}),
    "qwen2_moe-normalised": Variant("qwen2_moe", {"norm_topk_prob": True}, MBRIDGE),
    "qwen2_moe-no-bias": Variant("qwen2_moe", {"qkv_bias": False}),
    "qwen2_moe-sparse": Variant("qwen2_moe", {"decoder_sparse_step": 2}),
    "olmoe-normalised": Variant("olmoe", {"norm_topk_prob": True}),
    "olmoe-clip": Variant("olmoe", {"clip_qkv": 0.5}),
    "olmoe-fewer-keys": Variant("olmoe", {"num_key_value_heads": 2}),
    "glm4_moe-no-norm": Variant("glm4_moe", {"use_qk_norm": False}, BOTH),
    "glm4_moe-bias": Variant("glm4_moe", {"attention_bias": True}, BOTH),
    "glm4_moe-shared": Variant("glm4_moe", {"n_shared_experts": 2, "routed_scaling_factor": 2.5}, BOTH),
    "glm4_moe-groups": Variant("glm4_moe", {"n_group": 2, "topk_group": 1}, BOTH),
    "glm4_moe-many-groups": Variant(
        "glm4_moe", {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}, BOTH
    ),
    "gemma3_text-window": Variant(
        "gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2, **_LAYERED_ROPE}, MEGATRON_BRIDGE
    ),
    "gpt_oss-plain": Variant(
        "gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}, MEGATRON_BRIDGE
    ),
    "gpt_oss-published": Variant(
        "gpt_oss",
        {"rope_parameters": {**_YARN, "rope_theta": 150_000.0, "factor": 32.0, "truncate": False}},
        MEGATRON_BRIDGE,
    ),
    "gemma2-flat": Variant(
        "gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}, MEGATRON_BRIDGE
    ),
    **{
        f"{name}-one-expert": Variant(name.partition("-")[0], {**fields, "num_experts_per_tok": 1})
        for name, fields in {
            "qwen3_moe": {},
            "mixtral": {},
            "glm4_moe": {},
            "qwen3_moe-raw": {"norm_topk_prob": False},
        }.items()
    },
    "glm4_moe-not-shared": Variant("glm4_moe", {"n_shared_experts": 0}),
    "qwen2_moe-not-shared": Variant("qwen2_moe", {"shared_expert_intermediate_size": 0}),
    "glm4_moe-uneven-groups": Variant("glm4_moe", {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 3}),
    "glm4_moe-prediction": Variant("glm4_moe", {"num_nextn_predict_layers": 1}, BOTH),
    **{
        f"{family}-prediction": Variant(family, {"num_nextn_predict_layers": 1}, MEGATRON_BRIDGE)
        for family in ("deepseek_v3", "kimi_k2", "glm4_moe_lite")
    },
    "glm4_moe-raw": Variant("glm4_moe", {"norm_topk_prob": False}),
    "deepseek_v3-yarn": Variant(
        "deepseek_v3", {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}, MEGATRON_BRIDGE
    ),
    "deepseek_v3-many-groups": Variant(
        "deepseek_v3",
        {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "routed_scaling_factor": 2.5},
        MEGATRON_BRIDGE,
    ),
    "deepseek_v3-shared": Variant("deepseek_v3", {"n_shared_experts": 2, "first_k_dense_replace": 0}, MEGATRON_BRIDGE),
    "deepseek_v3-no-groups": Variant(
        "deepseek_v3", {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3}, MEGATRON_BRIDGE
    ),
    "deepseek_v2-shared": Variant(
        "deepseek_v2", {"n_shared_experts": 2, "routed_scaling_factor": 2.5}, MEGATRON_BRIDGE
    ),
    "minimax_m2-partial": Variant("minimax_m2", {"rotary_dim": 8}, MEGATRON_BRIDGE),
    **{
        f"deepseek_v3-{name}": Variant("deepseek_v3", fields)
        for name, fields in {
            "uneven-mscale": {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
            "no-mscale": {"rope_parameters": _YARN},
            "whole-queries": {"q_lora_rank": None},
            "raw": {"norm_topk_prob": False},
            "halves": {"rope_interleave": False},
            "bias": {"attention_bias": True},
            "one-expert": {"num_experts_per_tok": 1},
            "tied": {"tie_word_embeddings": True},
        }.items()
    },
    "deepseek_v2-groups": Variant(
        "deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
    ),
    "deepseek_v2-yarn": Variant("deepseek_v2", {"rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}),
    "deepseek_v2-normalised": Variant("deepseek_v2", {"norm_topk_prob": True}),
    "qwen3-quantized": Variant("qwen3", {"quantization_config": {"quant_method": "fp8"}}),
}

# Variants that tests compare with transformers under FSDP, and in which layouts
FSDP_DENSE = ("llama", "mistral-window", "gemma2", "gemma3_text-window", "phi3", "olmo2", "glm4", "qwen3_5_text")
FSDP_EXPERTS = (
    "qwen3_moe",
    "qwen2_moe",
    "mixtral",
    "olmoe",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "minimax_m2",
    "kimi_k2",
    "glm4_moe_lite",
    "qwen3_next",
    "qwen3_5_moe_text",
)
FSDP_OTHERS = ("qwen2", "qwen3", "gemma", "glm", "seed_oss", "smollm3", "exaone4")
FSDP_COUNTED = {name: Variant(name) for name in COUNTED}
FSDP_LAYOUTS = [
    (name, ParallelSizes(cp=2, edp=2)) for name in ("gpt_oss", "deepseek_v3", "gemma3_text-window", "gemma2")
]
TWO_RANKS = [ParallelSizes(tp=2, etp=2), ParallelSizes(pp=2), ParallelSizes(dp=2, ep=2), ParallelSizes(cp=2, edp=2)]
# Variants that tests compare with transformers on several Megatron ranks
LAYOUTS = [
    *((name, ParallelSizes(tp=2, etp=2)) for name in ("llama-llama3", "qwen3-wide-yarn", "glm4_moe-groups")),
    *((name, ParallelSizes(dp=2, ep=2)) for name in ("qwen3_moe-raw", "qwen2_moe", "mixtral", "olmoe")),
    *((name, ParallelSizes(tp=2, ep=2)) for name in ("qwen2_moe-normalised", "mixtral", "glm4_moe")),
    *((name, ParallelSizes(pp=2)) for name in ("qwen2-yarn", "glm4_moe-bias")),
    *((name, ParallelSizes(cp=2, edp=2)) for name in ("qwen2-yarn-mscale", "mistral-linear")),
    ("mistral-window", ParallelSizes(tp=2, etp=2)),
    ("qwen2-window", ParallelSizes(pp=2)),
    *(("deepseek_v3-yarn", sizes) for sizes in TWO_RANKS),
    *((name, ParallelSizes(tp=2, ep=2)) for name in ("deepseek_v3-many-groups", "deepseek_v2")),
    *(("minimax_m2-partial", sizes) for sizes in TWO_RANKS[1:]),
    *((name, sizes) for name in ("kimi_k2", "glm4_moe_lite") for sizes in TWO_RANKS),
    *((name, sizes) for name in ("gemma2", "gemma3_text-window") for sizes in TWO_RANKS[:2]),
    ("gemma2", ParallelSizes(cp=2, edp=2)),
    *(("gpt_oss", sizes) for sizes in (ParallelSizes(tp=2, edp=2), ParallelSizes(tp=2, ep=2), *TWO_RANKS[1:3])),
    *((name, sizes) for name in ("qwen3_next", "qwen3_5_moe_text") for sizes in TWO_RANKS),
    *(("qwen3_5_text", sizes) for sizes in (*TWO_RANKS[:2], TWO_RANKS[3])),
]
# Families that SGLang's CPU server is tested with
SERVED = (
    *(
        "gemma",
        "gemma2",
        "gemma3_text",
        "exaone4",
        "glm",
        "glm4",
        "olmo2",
        "phi3",
        "seed_oss",
        "smollm3",
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
    ),
    *("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe", "gpt_oss", "minimax_m2"),
    *("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
)
TIED = {family: {"tie_word_embeddings": True} for family in ("gemma", "gemma2", "gemma3_text")}


def config_of(variant: Variant) -> Any:
    """The config of a tiny model, as transformers has it."""
    own = FAMILIES[variant.family][0] if variant.family in FAMILIES else COUNTED[variant.family]
    fields = {**SHAPE, **own, **variant.fields}
    return CONFIG_MAPPING[variant.family](**deepcopy(fields))  # which transformers adds to


def write_tiny(variant: Variant, folder: Path) -> torch.nn.Module:
    """Writes the model as transformers does and returns it; every bias and norm differs from what it starts as."""
    torch.manual_seed(0)
    config = config_of(variant)
    capped = bool(getattr(config, "attn_logit_softcapping", None))  # which nothing but eager attention heeds
    attention = {"attn_implementation": "eager"} if capped else {}
    model = AutoModelForCausalLM.from_config(config, **attention).float().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if (tensor.ndim == 1 and "inv_freq" not in name) or name.endswith("_proj_bias"):
                tensor.uniform_(0.5, 1.5) if "norm" in name else tensor.normal_(0, 0.2)
            if name.endswith("linear_attn.norm.weight"):
                tensor.mul_(0.2)  # so that adding 1 and subtracting it again would lose bits
    model.save_pretrained(folder)
    return model


def hugging_face_log_probs(model: torch.nn.Module, batch: Batch) -> np.ndarray:
    """Log-probs of a batch's tokens `[tokens]`, NaN where nothing predicts."""
    expected: list[torch.Tensor] = []
    with torch.no_grad():
        for tokens in torch.from_numpy(batch.tokens).long().split(batch.lengths.tolist()):
            predicted = torch.log_softmax(model(tokens[None], use_cache=False).logits[0], -1)[:-1]
            expected += [predicted.new_full((1,), torch.nan), predicted.gather(1, tokens[1:, None])[:, 0]]
    return torch.cat(expected).float().numpy()
