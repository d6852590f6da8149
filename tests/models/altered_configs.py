"""Every field of a family's Hugging Face config, altered alone: values of its type that a model may have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tiny_models

# What a checkpoint, a tokenizer or transformers' own generation is told; no layer computes with it.
_IGNORED = frozenset(
    {
        *("transformers_version", "architectures", "output_hidden_states", "return_dict", "dtype", "problem_type"),
        *("chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "_name_or_path", "model_type"),
        *("output_attentions", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range"),
    }
)
_ACTIVATIONS = ["silu", "gelu", "gelu_pytorch_tanh", "relu"]
_ROPE_TABLES = [
    *tiny_models.ROPES.values(),
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
    {**tiny_models.ROPES["yarn"], "rope_type": "dynamic"},
    {**tiny_models.ROPES["yarn"], "attention_factor": 1.2},
    {**tiny_models.ROPES["yarn"], "mscale": 0.7},
    {**tiny_models.ROPES["yarn"], "mscale": 0.7, "mscale_all_dim": 1.3},
]
_VALUES: dict[str, list[Any]] = {
    "hidden_size": [32, 128],
    "intermediate_size": [48, 160],
    "num_hidden_layers": [1, 3],
    "num_attention_heads": [2, 8],
    "num_key_value_heads": [1, 2, 4],
    "vocab_size": [104, 128],
    "max_position_embeddings": [128, 256],
    "head_dim": [8, 32],
    "hidden_act": _ACTIVATIONS,
    "hidden_activation": _ACTIVATIONS,
    "sliding_window": [8, 4096, None],
    "sliding_window_pattern": [1, 2, "LG"],
    "_sliding_window_pattern": [1, 2],
    "max_window_layers": [0, 1],
    "layer_types": [["sliding_attention", "full_attention"], ["chunked_attention"] * 2, ["full_attention"] * 2],
    "rope_parameters": _ROPE_TABLES,
    "mlp_layer_types": [["sparse"] * 2, ["dense"] * 2, ["sparse", "dense"]],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    "scoring_func": ["softmax", "sigmoid"],
    "mlp_only_layers": [[0], [1]],
    "no_rope_layers": [[1, 1], [0, 0], [0, 1]],
    "no_rope_layer_interval": [1, 2],
    "clip_qkv": [0.5],
    "num_experts_per_tok": [1, 2, 3, 4],
    "num_experts": [2, 8],
    "num_local_experts": [2, 8],
    "n_routed_experts": [2, 8],
    "n_shared_experts": [0, 1, 2, None],
    "n_group": [1, 2, 4],
    "topk_group": [1, 2, 4],
    "first_k_dense_replace": [0, 1, 2],
    "decoder_sparse_step": [1, 2],
    "moe_intermediate_size": [16, 64],
    "shared_expert_intermediate_size": [0, 16, 96],
    "final_logit_softcapping": [None, 5.0],
    "attn_logit_softcapping": [None, 5.0],
    "query_pre_attn_scalar": [4, 64],
    "use_bidirectional_attention": [True, False, None],
    "partial_rotary_factor": [0.5, 1.0],
}


def altered(variant: tiny_models.Variant) -> Iterator[tuple[str, Any]]:
    """Fields of a tiny model's config, each with values beside its own."""
    for name, value in tiny_models.config_of(variant).to_dict().items():
        if name not in _IGNORED:
            others = _VALUES[name] if name in _VALUES else _others(value)
            yield from ((name, other) for other in others if other != value)


def _others(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value]
    return [value * 4, value / 4] if value else [0.1, 1.0]
