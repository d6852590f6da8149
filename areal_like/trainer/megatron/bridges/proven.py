"""Families, fields of config.json and rotary embeddings that the table of `tests/models` proves equal. No torch."""

from __future__ import annotations

from typing import Any

from allocation.families import FAMILIES as ALL
from allocation.families import NONE_OF_IT, families_with

_PROVEN = {name: (family, family.megatron) for name, family in ALL.items() if family.megatron is not None}
FAMILIES = tuple(_PROVEN)
EXPERTS = tuple(name for name, (family, _) in _PROVEN.items() if family.experts)
LATENT = tuple(name for name, (family, _) in _PROVEN.items() if family.latent_attention)
STATES = tuple(name for name, (family, _) in _PROVEN.items() if family.linear_attention)  # with gated delta nets
WINDOWS = tuple(name for name, (_, megatron) in _PROVEN.items() if megatron.windows)
UNUSABLE = {name: megatron.unusable for name, (_, megatron) in _PROVEN.items()}  # bridges

# Allowed values of each field; a family's own line precedes the one for all families.
ALLOWED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": NONE_OF_IT,
    "mlp_bias": NONE_OF_IT,
    "use_sliding_window": (*NONE_OF_IT, True),
    "clip_qkv": (None,),
    "mlp_only_layers": NONE_OF_IT,
    "decoder_sparse_step": (1,),
    "qkv_bias": (True,),
    "quantization_config": (None,),
    "dual_chunk_attention_config": (None,),
    "partial_rotary_factor": (None, 1),
    "use_bidirectional_attention": NONE_OF_IT,
    "rope_interleave": (True,),
    **{f"{name}.tie_word_embeddings": NONE_OF_IT for name in EXPERTS},  # SGLang does not share them
    **{f"{name}.{key}": its for name, (_, megatron) in _PROVEN.items() for key, its in megatron.fields.items()},
}
ONE_TENSOR_PARALLEL_RANK = tuple(name for name, (_, megatron) in _PROVEN.items() if megatron.one_tensor_rank)
# Megatron-core leaves a single expert's weight as it is, or does not start
SEVERAL_EXPERTS_PER_TOKEN = tuple(name for name, (_, megatron) in _PROVEN.items() if megatron.several_experts)
SHARED_EXPERTS = {
    name: field for name, (family, _) in _PROVEN.items() if (field := family.shared_ffn or family.shared_experts)
}
FIXED_HEAD_DIM = tuple(name for name, (_, megatron) in _PROVEN.items() if megatron.divided_heads)
MTP = families_with(lambda family: family.megatron and family.megatron.trains_mtp)
# The fields that a rotary embedding needs, all numbers.
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
ROPE_TYPES = {name: megatron.ropes for name, (_, megatron) in _PROVEN.items() if megatron.ropes}
