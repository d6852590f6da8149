"""A trainer under FSDP2."""

from __future__ import annotations

from functools import partial

from allocation.memory.activations import layer_activations, route_bytes, score_bytes
from allocation.memory.items import (
    AT_REST,
    COMMUNICATOR,
    CONTEXT,
    CUDA,
    NCCL,
    WORKSPACE,
    Footprint,
    Item,
    forward_only,
    staying,
    with_reserve,
)
from allocation.memory.transfer import buckets, communicators
from allocation.model_spec import ModelSpec
from allocation.parameters import LayerKind, kinds, layer, layers_together, vocabulary
from allocation.plan import ParallelSizes
from allocation.settings import MegatronSettings, Workload


def trainer(role: str, sizes: ParallelSizes, work: Workload) -> Footprint:
    """Return the footprint of FSDP2 with sharded float32 weights, gathered in `dtype` one layer at a time (torch
    fully_shard). With tensor parallelism ranks split the layers' matrices, and shard all else."""
    model, item = work.model, work.memory.item
    shards, tokens = sizes.dp * sizes.cp, work.tokens // sizes.cp
    everything, numbers = layers_together(model, range(model.layers)), kinds(model, range(model.layers))
    per_layer = [p.dense_on(sizes.tp, model.kv_heads) + p.experts for p in (layer(model, of) for of in numbers)]
    inside = everything.dense_on(sizes.tp, model.kv_heads) + everything.experts
    tables, everyone = (1 if model.tied_embeddings else 2) * vocabulary(model), shards * sizes.tp
    owned, tower = -(-(inside * sizes.tp + tables + model.hidden_size) // everyone), _tower(model, everyone)
    adapters = work.memory.trained < 1
    trained = int((owned + tower) * work.memory.trained) if adapters else owned + tower * work.memory.tower_trained
    frozen = Item(f"weights ({work.memory.dtype} shards)", (owned + tower) * item * adapters)
    static = [frozen, Item("weights (float32 shards)", 4 * (trained if adapters else owned + tower))]
    static += [Item("Adam's moments", trained * 8)]
    gradients = Item("gradients (float32 shards)", trained * 4)  # a step leaves none behind
    gathered = Item("gathered layers", (2 * max(per_layer) + tables) * item)
    if work.memory.offload_params:
        static = []
    full = work.megatron.recompute_granularity == "full" or work.memory.gradient_checkpointing
    unfused = {of: _unfused_bytes(model, of, item, sizes.tp) for of in numbers}
    one = {of: (layer_activations(model, sizes, of, work) + unfused[of]) * tokens for of in numbers}
    kept = sum(one[of] * n for of, n in numbers.items())
    if full:
        kept = model.hidden_size * item * tokens * model.layers + max(one.values())
    scores = score_bytes(model, work) * tokens
    logits = tokens * model.vocab_size // sizes.tp * item  # of each rank's predictions
    beside = [Item(CUDA, CONTEXT + WORKSPACE), Item(NCCL, COMMUNICATOR * communicators(sizes))]
    there = partial(staying, static, MegatronSettings(offload=work.megatron.offload))  # Megatron's own do nothing here
    export = Item("gathered weights", 2 * vocabulary(model) * item)
    replayed = role == "actor" and model.experts
    routes = Item("expert routes", route_bytes(model, sizes, range(model.layers), tokens) if replayed else 0)
    merging = partial(_merged_experts, role, work)
    named = {
        "load": static[:2],
        "log-probs": [*there("weights"), gathered, routes, merging(1), Item("attention scores", scores),
                      Item("logits", logits)],
        "forward and backward": [*there("weights"), gradients, gathered, routes, Item("activations", kept),
                                 merging(1 if full else sum(n for of, n in numbers.items() if of.experts)),
                                 Item("activations of images", _of_images(work, full, sizes)),
                                 Item("logits", logits), Item("head's gradient", vocabulary(model) * item)],
        "optimizer step": [*static, gradients],
        "weight update": [*there("weights"), export, Item("buckets", buckets(model, work))],
        "save": there("weights", "Adam's"),
        AT_REST: there(),
    }  # fmt: skip
    only = forward_only if role == "ref" else list
    return Footprint(role, tuple(only(with_reserve(named, beside))))


def _merged_experts(role: str, work: Workload, layers: int) -> Item:
    """Return the merged weights of the experts in so many layers, and as much again while one of them is merged, or
    its gradient is computed."""
    parameters = work.memory.merged_experts if role == "actor" else 0
    return Item("experts merged with adapters", (layers + 1) * parameters * work.memory.item)


def _tower(model: ModelSpec, shards: int) -> int:
    """Return parameters of the vision tower on a rank."""
    return -(-model.tower.parameters // shards) if model.tower else 0


def _of_images(work: Workload, recomputed: bool, sizes: ParallelSizes) -> int:
    """Return bytes that the vision tower keeps of the images with tokens on a rank of CP."""
    if work.model.tower is None:
        return 0
    trained = work.memory.tower_trained and work.memory.trained == 1
    return work.model.tower.activations(
        work.image_tokens // sizes.cp, work.memory.item, recomputed=recomputed, trained=trained
    )


def _unfused_bytes(model: ModelSpec, of: LayerKind, item: int, tp: int) -> int:
    """Return bytes per token that transformers' modules keep and Transformer Engine's do not. A norm computes in
    float32 and keeps its input in it; an MLP keeps the activation beside its product with the gate (`Qwen3RMSNorm` and
    `Qwen3MLP`, transformers 5.12 `models/qwen3/modeling_qwen3.py`); attention takes as many keys and values as queries
    (`areal_like/backends/training/kernel_attention.py`), those of gpt-oss under any trainer. Tensor parallelism splits
    heads and the MLP; every rank has whole hidden states, but `layer_activations` counts a part of them (Megatron's
    sequence parallelism).
    """
    normed = model.head_dim * (model.heads + model.kv_heads) if model.qk_norm else 0
    repeated = 0 if model.expert_bias else 2 * model.head_dim * max(0, model.heads - model.kv_heads)
    gated = 0 if of.experts else model.ffn
    whole = model.norms * model.hidden_size
    undivided = 2 * whole * item * (tp - 1) // tp
    return 4 * whole + undivided + (4 * normed + (repeated + gated) * item) // tp
