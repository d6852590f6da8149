"""Errors in a model's config.json: fields that are missing, not numbers, absurd, or inconsistent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from allocation.families import FAMILIES, Family

# The config's name of each field; an optional one that is missing, null or 0 keeps the default of `ModelSpec`.
REQUIRED = {
    "hidden_size": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "ffn": "intermediate_size", "vocab_size": "vocab_size",
}  # fmt: skip
OPTIONAL = {
    "kv_heads": "num_key_value_heads", "max_positions": "max_position_embeddings",
    "experts_per_token": "num_experts_per_tok", "router_groups": "n_group", "mtp_layers": "num_nextn_predict_layers",
    "linear_key_heads": "linear_num_key_heads", "linear_value_heads": "linear_num_value_heads",
    "linear_key_dim": "linear_key_head_dim", "linear_value_dim": "linear_value_head_dim",
    "linear_kernel": "linear_conv_kernel_dim", "head_dim": "head_dim", "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank", "qk_nope": "qk_nope_head_dim", "qk_rope": "qk_rope_head_dim",
    "value_dim": "v_head_dim", "index_heads": "index_n_heads", "index_dim": "index_head_dim",
}  # fmt: skip
_BOOLEANS = (
    "tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "use_qk_norm", "norm_topk_prob",
)  # fmt: skip
_OBJECTS = ("rope_parameters", "rope_scaling", "quantization_config", "text_config")
_COUNTS = ("sliding_window", "topk_group")
_LARGEST = 10**9
_MISSPELT = 0.93  # similarity: some configs have fields of their own, such as swa_num_key_value_heads
_MOST_LAYERS = 10_000  # rules and memory look at each


def problems(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Yield one sentence for every wrong field, by its name; relations only between fields that are right by
    themselves."""
    found = [*_wrong_fields(config, family), *_wrong_kinds(config), *_misspelt(config)]
    yield from found or _contradictions(config, family)


def _wrong_fields(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    required = list(dict.fromkeys([*REQUIRED.values(), *filter(None, (family.experts, family.expert_ffn))]))
    required += [name for name in ("decoder_sparse_step", "full_attention_interval") if name in family.defaults]
    if family.linear_attention:
        required += ["linear_num_key_heads", "linear_num_value_heads"]
    for name in required:
        if name not in config:
            close = get_close_matches(name, [key for key in config if key not in required], n=1, cutoff=0.85)
            yield f"{name} is missing" + (f" (is {close[0]!r} meant?)" if close else "")
    for name in (*required, *OPTIONAL.values(), *filter(None, (family.shared_ffn, family.shared_experts))):
        value = config.get(name)
        if name in config and not (value is None and name not in required):
            yield from _wrong_number(name, value, 1 if name in required else 0)
    first = config.get("first_k_dense_replace", 0)
    if not isinstance(first, int) or first < 0:
        yield f"first_k_dense_replace must be a number of layers, not {_show(first)}"
    named = config.get("mlp_only_layers") or []
    if not isinstance(named, list):
        yield f"mlp_only_layers must be a list of layers, not {_show(named)}"
    types, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if types and not (_is_list_of_names(types) and len(types) == layers):
        number = f", not {len(types)}" if isinstance(types, list) and len(types) != layers else ""
        yield f"layer_types must be a list of {_show(layers)} kinds of layers{number}"


def _wrong_kinds(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield fields of the wrong JSON type; null is an absent field."""
    given = {name: value for name, value in config.items() if value is not None}
    for name in [name for name in _BOOLEANS if name in given and given[name] not in (True, False)]:
        yield f"{name} must be true or false, not {_show(given[name])}"
    for name in [name for name in _OBJECTS if name in given and not isinstance(given[name], Mapping)]:
        yield f"{name} must be an object, not {_show(given[name])}"
    if not _is_list_of_names(given.get("architectures", [])):
        yield f"architectures must be a list of names, not {_show(given['architectures'])}"
    for name in [name for name in _COUNTS if name in given and given[name] is not False]:
        yield from _wrong_number(name, given[name], 0)
    theta = given.get("rope_theta", 1)
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0:
        yield f"rope_theta must be a positive number, not {_show(theta)}"


def _misspelt(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield unknown fields of a known family that resemble an optional one, which would be left at its default."""
    absent = [name for name in OPTIONAL.values() if name not in config]
    for name in config if config.get("model_type") in FAMILIES else ():
        close = get_close_matches(name, absent, n=1, cutoff=_MISSPELT)
        if close and name not in (*REQUIRED.values(), *OPTIONAL.values()):
            yield f"{name} is an unknown field (is {close[0]!r} meant?)"


def _wrong_number(name: str, value: object, smallest: int) -> Iterator[str]:
    largest = _MOST_LAYERS if name == "num_hidden_layers" else _LARGEST
    if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
        yield f"{name} must be a positive integer, not {_show(value)}"
    elif value > largest:
        yield f"{name} must be at most {largest:,}, not {_show(value)}"


def _contradictions(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Yield fields that cannot be true together."""
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads")
    if groups and not family.latent_attention and heads % groups:
        yield f"num_key_value_heads = {groups} does not divide num_attention_heads = {heads}"
    if not config.get("head_dim") and not family.latent_attention and config["hidden_size"] < heads:
        yield f"num_attention_heads = {heads} is more than hidden_size = {config['hidden_size']}, and head_dim is missing"
    kinds = [rope.get("rope_type", rope.get("type")) for rope in _ropes(config)]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        yield f"rope_parameters ({_show(kinds[0])}) and rope_scaling ({_show(kinds[1])}) have different types"
    experts, chosen = config[family.experts] if family.experts else 0, config.get("num_experts_per_tok") or 0
    if experts and chosen > experts:
        yield f"num_experts_per_tok = {chosen} is more than {family.experts} = {experts}"


def _is_list_of_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary embeddings that a config describes under either name, unless each kind of layers has its own."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if rope and not any(isinstance(part, Mapping) for part in rope.values()):
            yield rope


def _show(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _LARGEST:
        return f"{value:.0e}" if abs(value) < 10**300 else "a number of more than 300 digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
