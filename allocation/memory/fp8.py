"""Linear layers that an SGLang server computes in FP8: weights in blocks of 128 x 128 with one scale each."""

from __future__ import annotations

from allocation.model_spec import ModelSpec
from allocation.parameters import layers_together
from allocation.plan import ParallelSizes

BLOCK = 128
BYTES = 1 + 4 / BLOCK**2  # of a weight, with its part of the scale
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)  # whose linear layers have the usual names, and no others


def fp8_layers(model: ModelSpec, sizes: ParallelSizes) -> frozenset[str]:
    """Return the kinds of layers in FP8, by their Hugging Face names: those whose parts on a GPU are whole blocks.

    SGLang joins queries with keys and values, and gates with their neighbours, so these stay together.
    """
    if model.family not in FAMILIES or model.hidden_size % BLOCK:
        return frozenset()
    queries, keys = model.query_width // sizes.tp, max(1, model.kv_heads // sizes.tp) * model.head_dim
    experts = model.expert_ffn * sizes.ep // sizes.tp
    has_dense = not model.experts or model.dense_layers
    parts = {
        ("q_proj", "k_proj", "v_proj"): (queries, keys),
        ("o_proj",): (queries,),
        ("gate_proj", "up_proj", "down_proj"): (model.ffn // sizes.tp if has_dense else 0,),
        ("experts",): (experts if model.experts else 0,),
    }
    whole = (names for names, widths in parts.items() if all(width and width % BLOCK == 0 for width in widths))
    return frozenset(name for names in whole for name in names)


def fp8_share(model: ModelSpec, sizes: ParallelSizes) -> float:
    """Return the share of the layers' parameters that are in FP8."""
    layers, h, own = fp8_layers(model, sizes), model.hidden_size, model.layers
    dense = len(model.dense_layers) if model.experts else own
    found = h * own * (model.query_width + 2 * model.kv_heads * model.head_dim) * ("q_proj" in layers)
    found += h * own * model.query_width * ("o_proj" in layers)
    found += 3 * h * model.ffn * dense * ("gate_proj" in layers)
    found += 3 * h * model.expert_ffn * model.experts * (own - dense) * ("experts" in layers)
    return found / layers_together(model, range(own)).total
