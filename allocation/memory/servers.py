"""A server: weights, and the KV cache."""

from __future__ import annotations

from dataclasses import replace

from allocation.memory.fp8 import BYTES, fp8_share
from allocation.memory.items import (
    CACHE,
    CAPTURED,
    COMMUNICATOR,
    CONTEXT,
    CUDA,
    GRAPHS,
    UPDATE,
    WORKSPACE,
    Footprint,
    Item,
    Phase,
)
from allocation.memory.transfer import bucket
from allocation.model_spec import ModelSpec
from allocation.parameters import layers_together, vocabulary
from allocation.plan import ParallelSizes
from allocation.settings import Workload

WITH_WINDOW_POOL = ("gpt_oss",)
WINDOW_POOL = 0.8  # ratio of the tokens in the window pool and in the other pool


def server(role: str, sizes: ParallelSizes, work: Workload) -> Footprint:
    """Return the footprint of an SGLang or vLLM server: weights, and the rest of its share for the KV cache."""
    model, memory = work.model, work.memory
    weights = _weight_bytes(model, sizes, memory.item, fp8=memory.fp8_servers and role == "rollout")
    adapters = memory.served_adapters * memory.item if role == "rollout" else 0  # as on one GPU: TP splits some of them
    per_token = kv_token_bytes(model, sizes, memory.item)
    context = Item(CUDA, CONTEXT + WORKSPACE + COMMUNICATOR * (sizes.tp > 1) + COMMUNICATOR)
    room = None
    cache = 0
    if memory.gpu_bytes is not None:
        cache = max(0, int(memory.gpu_bytes * memory.mem_fraction_static) - weights - adapters - context.bytes)
        room = cache // per_token if per_token else 0
    elif work.batch is not None and work.batch.max_length is not None:
        cache = -(-work.batch.sequences // sizes.dp) * work.batch.max_length * per_token
    graphs, kv = Item(CAPTURED, GRAPHS), Item(CACHE, cache)
    held = [Item("weights", weights), Item("adapters", adapters)]
    named = {
        "load": held,
        "rollout": [*held, kv, graphs],
        UPDATE: [*held, kv, graphs, Item("bucket", bucket(model, work))],
    }
    phases = [Phase(name, tuple(i for i in (*items, context) if i.bytes)) for name, items in named.items()]
    return Footprint(role, tuple(phases), 0, per_token, room)


def _weight_bytes(model: ModelSpec, sizes: ParallelSizes, item: int, *, fp8: bool) -> int:
    """Return the bytes of a server's weights on one GPU; in FP8 embedding and output layer stay as they are."""
    weights = server_weights(model, sizes)
    layers = weights - server_weights(replace(model, layers=0, dense_layers=(), linear_layers=()), sizes)
    return weights * item - int(layers * fp8_share(model, sizes) * (item - BYTES)) if fp8 else weights * item


def server_weights(model: ModelSpec, sizes: ParallelSizes) -> int:
    """Return the parameters on one GPU of a server; TP splits experts too, whole (EP) or by columns."""
    layers = layers_together(model, range(model.layers))
    tables = (1 if model.tied_embeddings else 2) * vocabulary(model, 64 * sizes.tp) // sizes.tp
    tables += -(-model.tower.parameters // sizes.tp) if model.tower else 0
    return (layers.dense_on(sizes.tp, model.kv_heads) + layers.experts // sizes.tp) // sizes.pp + tables


def kv_token_bytes(model: ModelSpec, sizes: ParallelSizes, item: int) -> int:
    """Return the bytes of one token in the KV cache on one GPU of a server.

    SGLang keeps sliding-window layers in full, except for models with a separate pool for them (`is_hybrid_swa_model`,
    `swa_full_tokens_ratio` of SGLang 0.5.17).
    """
    share = WINDOW_POOL if model.family in WITH_WINDOW_POOL else 1
    sliding = len(model.sliding_layers)
    layers = model.layers - len(model.linear_layers) - sliding + share * sliding
    return int(layers / sizes.pp * _kv_layer_bytes(model, sizes, item))


def kv_read_bytes(model: ModelSpec, sizes: ParallelSizes, item: int, tokens: float) -> float:
    """Return the bytes of KV cache that a decoding step reads for one sequence, limited by a sliding window."""
    sliding = len(model.sliding_layers)
    full = model.layers - len(model.linear_layers) - sliding
    each = full * tokens + sliding * min(tokens, model.window)
    return each / sizes.pp * _kv_layer_bytes(model, sizes, item)


def _kv_layer_bytes(model: ModelSpec, sizes: ParallelSizes, item: int) -> int:
    """Return the bytes of one token in one layer; latent attention keeps one vector on each GPU."""
    if model.latent_attention:
        return (model.kv_rank + model.qk_rope) * item
    return 2 * max(1, model.kv_heads // sizes.tp) * model.head_dim * item
