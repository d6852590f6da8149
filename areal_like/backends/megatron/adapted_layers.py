"""Megatron's linear layers that can have adapters: which Hugging Face modules each joins, and the order of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class AdaptedPart(NamedTuple):
    """A Hugging Face module in a layer of Megatron, with its number of `outputs`.

    With `runs` each head has several runs of outputs, such as a query and its gate, of these sizes. The module has all
    runs of the first head, then the next head's; with `by_run` the first run of all heads, then their second.
    """

    outputs: int
    runs: tuple[int, ...] = ()
    by_run: bool = False


class Joined(NamedTuple):
    """A linear layer of Megatron: its place in a decoder layer, and the modules that it joins, by name.

    The modules' outputs alternate in `blocks` on a rank: a query group's queries, keys and values, then the next
    group's. Inside a block Megatron has the first run of all heads, then their second. Tensor parallelism splits
    `outputs` or `inputs`, or nothing: then each rank computes its part of the sequence.
    """

    place: str
    inputs: int
    parts: dict[str, AdaptedPart]
    splits: str = "outputs"
    blocks: int = 1


def joined_layers(config: Any, family: str) -> Iterator[Joined]:
    """Yield the linear layers of decoder layers without experts, sizes over all ranks but for `blocks`."""
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    yield from _latent(config) if config.multi_latent_attention else _attention(config)
    if config.experimental_attention_variant == "gated_delta_net":
        yield from _delta_net(config, family)
    yield Joined("mlp.linear_fc1", hidden, {"mlp.gate_proj": AdaptedPart(ffn), "mlp.up_proj": AdaptedPart(ffn)})
    yield Joined("mlp.linear_fc2", ffn, {"mlp.down_proj": AdaptedPart(hidden)}, "inputs")


def _attention(config: Any) -> Iterator[Joined]:
    hidden, width = config.hidden_size, config.kv_channels
    queries, keys = config.num_attention_heads * width, config.num_query_groups * width
    gated = AdaptedPart(2 * queries, (width, width)) if config.attention_output_gate else AdaptedPart(queries)
    parts = {"self_attn.q_proj": gated, "self_attn.k_proj": AdaptedPart(keys), "self_attn.v_proj": AdaptedPart(keys)}
    blocks = config.num_query_groups // config.tensor_model_parallel_size
    yield Joined("self_attention.linear_qkv", hidden, parts, blocks=blocks)
    yield Joined("self_attention.linear_proj", queries, {"self_attn.o_proj": AdaptedPart(hidden)}, "inputs")


def _latent(config: Any) -> Iterator[Joined]:
    hidden, heads, compressed = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    queries = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
    keys_and_values, values = heads * (config.qk_head_dim + config.v_head_dim), heads * config.v_head_dim
    of_queries = {"linear_q_proj": ("q_proj", hidden, queries, "outputs")}
    if config.q_lora_rank:
        of_queries = {
            "linear_q_down_proj": ("q_a_proj", hidden, config.q_lora_rank, "nothing"),
            "linear_q_up_proj": ("q_b_proj", config.q_lora_rank, queries, "outputs"),
        }
    layers = of_queries | {
        "linear_kv_down_proj": ("kv_a_proj_with_mqa", hidden, compressed + config.qk_pos_emb_head_dim, "nothing"),
        "linear_kv_up_proj": ("kv_b_proj", compressed, keys_and_values, "outputs"),
        "linear_proj": ("o_proj", values, hidden, "inputs"),
    }
    for place, (name, inputs, outputs, splits) in layers.items():
        yield Joined(f"self_attention.{place}", inputs, {f"self_attn.{name}": AdaptedPart(outputs)}, splits)


def _delta_net(config: Any, family: str) -> Iterator[Joined]:
    """Yield the layers of a gated delta net, whose heads are key heads; several value heads belong to each."""
    hidden, keys, heads = config.hidden_size, config.linear_key_head_dim, config.linear_num_key_heads
    each = config.linear_num_value_heads // heads
    values = each * config.linear_value_head_dim
    modules = {
        "in_proj_qkv": ((keys, keys, values), True),
        "in_proj_z": ((values,), False),
        "in_proj_b": ((each,), False),
        "in_proj_a": ((each,), False),
    }
    if family == "qwen3_next":
        modules = {"in_proj_qkvz": ((keys, keys, values, values), False), "in_proj_ba": ((each, each), False)}
    parts = {
        f"linear_attn.{name}": AdaptedPart(heads * sum(runs), runs, by_run) for name, (runs, by_run) in modules.items()
    }
    yield Joined("self_attention.in_proj", hidden, parts)
    yield Joined("self_attention.out_proj", heads * values, {"linear_attn.out_proj": AdaptedPart(hidden)}, "inputs")


def by_run(rows: Tensor, runs: Sequence[int], blocks: int = 1) -> Tensor:
    """Reorder rows that lie head by head: in each of the blocks, the first run of all heads, then their second."""
    heads = rows.unflatten(0, (blocks, -1, sum(runs)))
    return torch.cat([run.flatten(1, 2) for run in heads.split(list(runs), 2)], 1).flatten(0, 1)


def by_head(rows: Tensor, runs: Sequence[int]) -> Tensor:
    """Reorder rows that lie run by run: all runs of the first head, then the next head's."""
    heads = len(rows) // sum(runs)
    parts = rows.split([heads * run for run in runs])
    return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 1)
