"""Activations that layers keep for the backward pass.

They follow from Transformer Engine's modules (`module/layernorm_linear.py`, `attention/dot_product_attention`), in the
manner of Korthikanti et al., arXiv 2205.05198.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from allocation.model_spec import ModelSpec
from allocation.parameters import LayerKind, kind, kinds, prediction_kind
from allocation.plan import ParallelSizes
from allocation.settings import Workload


def activations(
    sizes: ParallelSizes, work: Workload, chunks: Sequence[Sequence[int]], stage: int, tokens: int
) -> tuple[int, int]:
    """Return bytes that all micro-batches in flight and one recomputed unit of layers keep for the backward pass.

    `chunks` are the layers of each virtual stage of a pipeline stage.
    """
    settings, model = work.megatron, work.model
    layers = [number for chunk in chunks for number in chunk]
    size = {of: layer_activations(model, sizes, of, work) * tokens for of in kinds(model, layers)}
    each = [[size[kind(model, number)] for number in chunk] for chunk in chunks]
    if settings.recompute_granularity != "full" or not layers:
        return most_kept([sum(chunk) for chunk in each], sizes, work, stage), 0
    entry = -(-model.hidden_size * work.memory.item // sizes.tp) * tokens
    step = settings.recompute_num_layers or 1
    if settings.recompute_method == "block":
        unit = max(size.values())
        kept = [entry * min(step, len(chunk)) + sum(chunk[step:]) for chunk in each]
    else:
        unit = max(sum(chunk[i : i + step]) for chunk in each for i in range(0, len(chunk), step))
        kept = [entry * -(-len(chunk) // step) for chunk in each]
    return most_kept(kept, sizes, work, stage), unit


def prediction_activations(sizes: ParallelSizes, work: Workload, tokens: int) -> tuple[int, int]:
    """Return bytes that the layer for multi-token prediction keeps for the backward pass, and while it is recomputed.

    Beside the bytes of a decoder layer, these are the embeddings of the next tokens, the projection's input of twice
    the width, and the last norm's input.
    """
    model, settings = work.model, work.megatron
    entry = -(-model.hidden_size * work.memory.item // sizes.tp) * tokens
    whole = layer_activations(model, sizes, prediction_kind(model), work) * tokens + 4 * entry
    full = settings.recompute_granularity == "full" and settings.recompute_method == "uniform"
    return (entry, whole) if full and settings.recompute_num_layers == 1 else (whole, 0)


def most_kept(chunks: Sequence[int], sizes: ParallelSizes, work: Workload, stage: int) -> int:
    """Return the most bytes whose backward a stage waits for, where a micro-batch keeps `chunks` of them.

    Megatron-LM `core/pipeline_parallel/schedules.py`: `pp - stage` micro-batches with one chunk a rank, else
    `(pp - stage - 1) * 2 + (vpp - 1) * group + 1` chunks, a group being pp micro-batches or more, which go through
    the first chunk together, then through the next, and backward in the other direction; never more than there are.
    """
    pp, vpp = sizes.pp, len(chunks)
    if vpp == 1:
        return chunks[0] * min(pp - stage, micro_batches(sizes, work))
    group, total = work.megatron.microbatch_group_size_per_vp_stage or pp, micro_batches(sizes, work) * vpp
    at_once = min((pp - stage - 1) * 2 + (vpp - 1) * group + 1, total)
    if len({*chunks}) == 1:
        return chunks[0] * at_once
    turn = group * vpp
    forward = [chunks[i // group % vpp] if i < total else 0 for i in range(at_once + turn)]
    backward = [chunks[vpp - 1 - i // group % vpp] for i in range(turn)]
    changes = (new - old for new, old in zip(forward[at_once:], backward, strict=True))
    return max(accumulate(changes, initial=sum(forward[:at_once])))


def micro_batches(sizes: ParallelSizes, work: Workload) -> int:
    """Return micro-batches of a rank in one optimizer step; many when the batch is not known."""
    batch = work.batch
    if batch is None or batch.max_length is None:
        return 1 << 20
    sequences = max(1, batch.sequences // batch.n_minibatches // sizes.dp)
    if batch.micro_batch is not None:
        return max(1, sequences // batch.micro_batch)
    return max(1, -(-sequences * batch.max_length // work.tokens))


def layer_activations(model: ModelSpec, sizes: ParallelSizes, of: LayerKind, work: Workload) -> int:
    """Return bytes that a layer keeps for backward, for each token of a rank (before tensor parallelism)."""
    item, tp = work.memory.item, sizes.tp
    modules = set(work.megatron.recompute_modules) if work.megatron.recompute_granularity == "selective" else set()
    hidden = model.hidden_size / tp * item  # sequence parallelism is on wherever TP is
    norms = 2 * hidden * (model.norms - ("layernorm" in modules))
    kept = norms + _attention_activations(model, sizes, of, item, modules)
    kept += 0 if of.linear or "core_attn" in modules else score_bytes(model, work) / tp
    if not of.experts:
        return int(kept + (0 if "mlp" in modules else 3 * model.ffn * item / tp))
    if "moe" in modules:
        return int(kept)
    return int(kept + _moe_activations(model, sizes, item, modules))


def score_bytes(model: ModelSpec, work: Workload) -> int:
    """Return bytes per token of capped attention scores: tanh and softmax, of every earlier token of the sequence."""
    longest = work.batch.max_length if work.batch is not None else None
    return model.capped_attention * 8 * model.heads * min(work.tokens, longest or work.tokens)


def _attention_activations(
    model: ModelSpec, sizes: ParallelSizes, of: LayerKind, item: int, modules: set[str]
) -> float:
    """Return queries, keys and values as attention takes them, as the norm before it takes them, its output and
    log-sums."""
    tp = sizes.tp
    sums = 4 * model.heads / tp
    if of.linear:
        keys = model.linear_key_heads * model.linear_key_dim
        return 6 * (keys + model.linear_value_heads * model.linear_value_dim) * item / tp
    if model.latent_attention:
        out, inner = model.heads * model.value_dim, 2 * model.query_width + model.heads * model.qk_nope
        compressed = 2 * (model.q_rank + model.kv_rank) + model.qk_rope
        up = 0 if "mla_up_proj" in modules else inner + 2 * out
        return (compressed + (up + out) / tp) * item + sums
    q = model.heads * model.head_dim / tp
    kv = model.head_dim * max(1, model.kv_heads / tp)
    if model.expert_bias:  # gpt-oss: because of its sinks keys and values are repeated, and the keys attended to
        return 6 * q * item + 2 * sums
    normed = q + kv if model.qk_norm else 0
    gate = q if model.linear_layers else 0
    return (2 * q + 2 * kv + normed + gate) * item + sums


def _moe_activations(model: ModelSpec, sizes: ParallelSizes, item: int, modules: set[str]) -> float:
    """Return router and permutation, the tokens as experts take them, their activations, and the shared experts."""
    local = 1 / sizes.tp
    chosen, h, width = model.experts_per_token, model.hidden_size, model.expert_ffn
    router = model.experts * (3 * 4 + 1 + 2 * 4)  # logits, scores and probabilities; the map; the permutation's map
    activation = 2 if "moe_act" in modules else 3
    experts = chosen * (h * sizes.etp + activation * width) * item
    shared = 0 if "shared_experts" in modules else 3 * model.shared_ffn * item
    return local * (router + experts + shared)


def layer_workspace(model: ModelSpec, sizes: ParallelSizes, of: LayerKind, work: Workload) -> int:
    """Return bytes for each token that backward through a layer needs for a moment: gradients of its widest
    activations."""
    item, tp = work.memory.item, sizes.tp
    width = 3 * model.ffn / tp
    if of.experts:
        width = model.experts_per_token * (2 * model.hidden_size * sizes.etp + 3 * model.expert_ffn) / tp
    return int((width + 2 * model.hidden_size * (1 + (tp > 1))) * item)


def route_bytes(model: ModelSpec, sizes: ParallelSizes, layers: Sequence[int], tokens: int) -> int:
    """Return bytes of a micro-batch's routes: small integers of all layers, and 8 bytes for each route of the stage."""
    dense = {*model.dense_layers}
    item = 1 if model.experts <= 255 else 2
    own = sum(layer not in dense for layer in layers)
    return tokens * model.experts_per_token * (item * (model.layers - len(dense)) + -(-8 * own // sizes.tp))
