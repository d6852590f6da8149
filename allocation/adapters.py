"""Linear layers that low-rank adapters can have, by transformers' names, with their sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from allocation.families import families_with
from allocation.model_spec import ModelSpec

# Families whose experts can have adapters under FSDP: transformers packs the matrices of their experts in one form
WITH_EXPERTS = families_with(lambda family: family.fsdp.packs_experts)
_FUSED_QKV = families_with(lambda family: "qkv_proj" in family.fsdp.fused)
_FUSED_GATE = families_with(lambda family: "gate_up_proj" in family.fsdp.fused)


def adapter_parameters(model: ModelSpec, rank: int, targets: Callable[[str], bool]) -> int:
    """Return parameters of low-rank adapters of the modules whose names `targets` wants."""
    layers = dict(adaptable_layers(model))
    if adapts_experts(model):
        layers |= _with_experts(model)
    return rank * sum(both for name, both in layers.items() if targets(name))


def adapts_experts(model: ModelSpec) -> bool:
    """Return whether the FSDP trainer has adapters for the model's experts."""
    return model.experts > 0 and model.family in WITH_EXPERTS and model.tower is None


def merged_parameters(model: ModelSpec, targets: Callable[[str], bool]) -> int:
    """Return parameters of a layer's experts that are merged with adapters while the layer computes."""
    if not adapts_experts(model):
        return 0
    gate_up, down = (any(map(targets, names)) for names in (("gate_proj", "up_proj"), ("down_proj",)))
    return model.experts * model.hidden_size * model.expert_ffn * (2 * gate_up + down)


def adaptable_layers(model: ModelSpec) -> Mapping[str, int]:
    """Return the inputs and outputs of all layers of a name together; of a model with experts, attention alone."""
    if model.counted:
        return dict(model.counted.linear)
    layers = attention_layers(model)
    if not model.experts:
        layers |= {name: model.layers * ends for name, ends in _feed_forward(model)}
    return layers


def attention_layers(model: ModelSpec) -> dict[str, int]:
    """Return the inputs and outputs of the linear layers in attention and in gated delta nets, all of a name together.

    The model's family must be known.
    """
    linear = len(model.linear_layers)
    full = _latent(model) if model.latent_attention else _attention(model)
    layers = {name: (model.layers - linear) * ends for name, ends in full}
    return layers | ({name: linear * ends for name, ends in _delta_net(model)} if linear else {})


def _attention(model: ModelSpec) -> Iterator[tuple[str, int]]:
    hidden, queries, keys = model.hidden_size, model.query_width, model.kv_heads * model.head_dim
    if model.family in _FUSED_QKV:
        yield "qkv_proj", hidden + queries + 2 * keys
    else:
        gate = queries if model.linear_layers else 0  # in q_proj, as Qwen3-Next has it
        yield "q_proj", hidden + queries + gate
        yield "k_proj", hidden + keys
        yield "v_proj", hidden + keys
    yield "o_proj", queries + hidden


def _latent(model: ModelSpec) -> Iterator[tuple[str, int]]:
    hidden, values = model.hidden_size, model.heads * model.value_dim
    if model.q_rank:
        yield "q_a_proj", hidden + model.q_rank
        yield "q_b_proj", model.q_rank + model.query_width
    else:
        yield "q_proj", hidden + model.query_width
    yield "kv_a_proj_with_mqa", hidden + model.kv_rank + model.qk_rope
    yield "kv_b_proj", model.kv_rank + model.heads * model.qk_nope + values
    yield "o_proj", values + hidden


def _delta_net(model: ModelSpec) -> Iterator[tuple[str, int]]:
    hidden, heads = model.hidden_size, model.linear_value_heads
    keys, values = model.linear_key_heads * model.linear_key_dim, heads * model.linear_value_dim
    if model.family == "qwen3_next":
        yield "in_proj_qkvz", hidden + 2 * keys + 2 * values
        yield "in_proj_ba", hidden + 2 * heads
    else:
        yield "in_proj_qkv", hidden + 2 * keys + values
        yield "in_proj_z", hidden + values
        yield "in_proj_b", hidden + heads
        yield "in_proj_a", hidden + heads
    yield "out_proj", values + hidden


def _feed_forward(model: ModelSpec) -> Iterator[tuple[str, int]]:
    if model.family in _FUSED_GATE:
        yield "gate_up_proj", model.hidden_size + 2 * model.ffn
    else:
        yield "gate_proj", model.hidden_size + model.ffn
        yield "up_proj", model.hidden_size + model.ffn
    yield "down_proj", model.ffn + model.hidden_size


def _with_experts(model: ModelSpec) -> dict[str, int]:
    """Return the inputs and outputs of the matrices of experts, shared experts and dense layers, all of a name.

    Each of a layer's three matrices connects the hidden size to an inner size.
    """
    hidden, dense = model.hidden_size, len(model.dense_layers)
    shared = hidden + model.shared_ffn if model.shared_ffn else 0
    sparse = model.experts * (hidden + model.expert_ffn) + shared
    ends = (model.layers - dense) * sparse + dense * (hidden + model.ffn)
    return dict.fromkeys(("gate_proj", "up_proj", "down_proj"), ends)
