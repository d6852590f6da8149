"""A Megatron trainer.

Static memory follows Megatron-core 0.19: `core/distributed/param_and_grad_buffer.py` (parameters and float32 gradients
in buffers), `core/optimizer/distrib_optimizer.py` (main weights and moments, sharded). The trainer computes logits in
chunks of tokens (`areal_like/core/trainer/logprobs.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from allocation.memory.activations import activations, layer_workspace, most_kept, prediction_activations, route_bytes
from allocation.memory.items import (
    AT_REST,
    COMMUNICATOR,
    CONTEXT,
    CUDA,
    NCCL,
    WORKSPACE,
    Footprint,
    Item,
    Phase,
    forward_only,
    staying,
    with_reserve,
)
from allocation.memory.transfer import buckets, communicators, largest_gathered, largest_weight
from allocation.parameters import Held, count_held, distinct_stages, kinds, stage_chunks, vocabulary
from allocation.plan import ParallelSizes
from allocation.settings import ITEMS, Workload

_PER_TOKEN = 128  # labels, rows, log-probs, entropies, advantages and their gradients
_LOGITS_AT_ONCE = 1 << 28  # elements


def trainer(role: str, sizes: ParallelSizes, work: Workload) -> Footprint:
    """Return the footprint of a Megatron trainer: the stage with the highest peak."""
    chunks = stage_chunks(work.model, sizes, work.megatron)
    trains = role != "ref"
    only = list if trains else forward_only
    stages = distinct_stages(work.model, chunks)
    replays = role == "actor"
    stage_phases = {
        stage: list(only(phases_of_stage(sizes, work, chunks[stage], stage, trains, replays=replays)))
        for stage in stages
    }
    worst = max(stage_phases, key=lambda stage: max(phase.bytes for phase in stage_phases[stage]))
    return Footprint(role, tuple(stage_phases[worst]), worst)


def phases_of_stage(
    sizes: ParallelSizes,
    work: Workload,
    chunks: Sequence[Sequence[int]],
    stage: int,
    trains: bool,
    *,
    replays: bool = False,
) -> list[Phase]:
    """Return the phases of a rank of one pipeline stage, whose virtual stages have the layers `chunks`.

    With `replays` routers choose the experts that the servers chose.
    """
    layers = [number for chunk in chunks for number in chunk]
    model, first, last = work.model, stage == 0, stage == sizes.pp - 1
    predicts = last and work.predicts
    mine = count_held(model, sizes, layers, first=first, last=last, predicts=predicts)
    static = _static(mine, sizes, work)
    beside = [Item(CUDA, CONTEXT + WORKSPACE), Item(NCCL, COMMUNICATOR * communicators(sizes))]
    tokens = work.tokens // sizes.cp
    kept, unit = activations(sizes, work, chunks, stage, tokens)
    heads, logits = 1 + predicts, partial(_logits, sizes, work, tokens)
    if predicts:
        more, again = prediction_activations(sizes, work, tokens)
        kept, unit = kept + more, max(unit, again)
    inside = max((layer_workspace(model, sizes, of, work) * tokens for of in kinds(model, layers)), default=0)
    table = last * vocabulary(model, sizes.tp) // sizes.tp * work.memory.item
    ends = (
        last * heads * tokens * (_PER_TOKEN + (4 + (sizes.tp > 1)) * work.memory.item * model.hidden_size // sizes.tp)
    )
    in_layer = [Item("recomputed layers", unit), Item("inside a layer", inside)]
    if work.megatron.deterministic_mode:
        in_layer.append(Item("deterministic attention", _deterministic(sizes, work, tokens)))
    tied, alone = model.tied_embeddings and first, sizes.dp * sizes.cp == 1
    deeper = _deeper(last * logits(heads), table, ends, in_layer, tied=tied, alone=alone)
    exported = largest_gathered(model, sizes, work)
    there = partial(staying, static, work.megatron)
    images = _of_images(sizes, work, len(chunks)) if first else 0
    routes = [Item("expert routes", route_bytes(model, sizes, layers, tokens))] if replays and model.experts else []
    named = {
        "load": _loading(mine, static, sizes, work) if trains else _reading(static[0], sizes, work),
        "log-probs": [*there("weights"), *routes, _read(last * logits(), inside)],
        "forward and backward": [*there("weights", "gradients"), Item("activations", kept),
                                 Item("activations of images", images), *routes, *deeper],
        "optimizer step": static,
        "weight update": [*there("weights"), Item("gathered weights", exported), Item("buckets", buckets(model, work))],
        "save": there("weights", "main", "Adam's"),
        AT_REST: there(),
    }  # fmt: skip
    return with_reserve(named, beside)


def _logits(sizes: ParallelSizes, work: Workload, tokens: int, heads: int = 1) -> int:
    """Return bytes of the logits that exist at once: of all tokens for each head, or else one slice of them."""
    each = tokens * (vocabulary(work.model, sizes.tp) // work.model.hidden_size // sizes.tp)
    return (heads * each if each <= _LOGITS_AT_ONCE else _LOGITS_AT_ONCE) * work.memory.item


def _deterministic(sizes: ParallelSizes, work: Workload, tokens: int) -> int:
    """Return bytes of the workspace in which cuDNN's deterministic backward pass keeps products of packed sequences.

    Each sequence has room for as many positions as the micro-batch has tokens, both numbers rounded up to powers of
    two. This explains the 384 GiB that 256 sequences with 12 heads and at most 8,192 tokens asked for on an H200
    (Transformer Engine 2.16). The estimate counts the fewest sequences, all as long as they may be.
    """
    longest = work.batch.max_length if work.batch and work.batch.max_length else tokens
    sequences = 1 << (max(1, tokens // longest) - 1).bit_length()
    return 2 * sequences * (work.model.heads // sizes.tp) * (1 << (tokens - 1).bit_length()) ** 2


def _of_images(sizes: ParallelSizes, work: Workload, virtual: int) -> int:
    """Return bytes that the tower keeps of the images of all micro-batches in flight; TP ranks all compute it whole."""
    if work.model.tower is None:
        return 0
    trained = work.memory.tower_trained and work.memory.trained == 1
    one = work.model.tower.activations(work.image_tokens // sizes.cp, work.memory.item, trained=trained)
    return most_kept([one, *[0] * (virtual - 1)], sizes, work, 0) if trained else one


def _deeper(logits: int, table: int, ends: int, in_layer: list[Item], *, tied: bool, alone: bool) -> list[Item]:
    """Return the items of the backward pass, which starts at the head and continues with one recomputed unit at a time.

    Logits add the gradient of the output weight to Megatron's buffer. Afterwards autograd holds a gradient of zeros if
    ranks send gradients early, unless the weight is also the embedding, whose gradient comes last.
    """
    zeros = Item("head's gradient", 0 if tied or alone else table)
    return max(
        [max(Item("logits", logits), zeros, key=lambda item: item.bytes), Item("head", ends)], in_layer, key=_sum
    )


def _sum(items: Sequence[Item]) -> int:
    return sum(item.bytes for item in items)


def _read(logits: int, inside: int) -> Item:
    """Return the largest item beside the weights in a pass without backward."""
    return max(Item("logits", logits), Item("inside a layer", inside), key=lambda item: item.bytes)


def _reading(weights: Item, sizes: ParallelSizes, work: Workload) -> list[Item]:
    """Return the items at the peak of loading: the model's weights and the largest single weight.

    The largest weight is held whole, split for the TP ranks, and as one of these parts (mbridge 0.15 `core/bridge.py`,
    `load_weights`).
    """
    largest = largest_weight(work.model, work)
    return [weights, Item("weight that is read", largest + largest // sizes.tp)]


def _loading(mine: Held, static: Sequence[Item], sizes: ParallelSizes, work: Workload) -> list[Item]:
    """Return the worst of three moments: reading weights, moving them to one buffer, and copying them to main weights.

    See Megatron-core 0.19 `core/distributed/param_and_grad_buffer.py` (experts spread by EP have a separate buffer,
    which comes last) and `core/optimizer/distrib_optimizer.py` (`shard_model_param.clone().float()`).
    """
    weights, gradients, main, _ = static
    item, trained, sharded = work.memory.item, work.memory.trained, work.megatron.use_distributed_optimizer
    last = mine.expert if sizes.ep > 1 and mine.expert else mine.total
    moved = int(last * item * trained) if sharded else 0
    largest = largest_weight(work.model, work) // sizes.tp // _shards(sizes, work)
    moments = (
        _reading(weights, sizes, work),
        [weights, gradients, Item("weights before they move", moved)],
        [weights, gradients, main, Item("copy of the largest weight", int(largest * trained) if main.bytes else 0)],
    )
    return max(moments, key=_sum)


def _static(mine: Held, sizes: ParallelSizes, work: Workload) -> list[Item]:
    """Return weights, gradients, main weights and moments; the distributed optimizer shards the last two.

    The precision-aware optimizer keeps only 16 bits of each main weight: the bits that a bfloat16 weight lacks compared
    with float32, or a float16 copy (`store_param_remainders`, megatron-core 0.19 `core/optimizer/optimizer_config.py`).
    """
    item, trained, sharded = work.memory.item, work.memory.trained, work.megatron.use_distributed_optimizer
    settings = work.megatron
    main, grads, moments = ("float32", 4), "float32", 8
    if settings.use_precision_aware_optimizer:
        main, grads = ("16 bits", 2), settings.main_grads_dtype
        moments = ITEMS[settings.exp_avg_dtype] + ITEMS[settings.exp_avg_sq_dtype]
    copies = settings.num_distributed_optimizer_instances
    tower = mine.tower * work.memory.tower_trained
    owned = -(-(mine.dense + tower) // _shards(sizes, work)) + -(
        -mine.expert // (max(1, sizes.edp // copies) if sharded else 1)
    )
    return [
        Item("weights", mine.total * item),
        Item(f"gradients ({grads})", int((mine.dense + mine.expert + tower) * trained * ITEMS[grads])),
        Item(f"main weights ({main[0]})", int(owned * trained * main[1]) if item < 4 else 0),
        Item("Adam's moments", int(owned * trained * moments)),
    ]


def _shards(sizes: ParallelSizes, work: Workload) -> int:
    """Return the number of ranks that shard the optimizer of the dense parameters."""
    settings = work.megatron
    copies = settings.num_distributed_optimizer_instances
    return max(1, sizes.dp * sizes.cp // copies) if settings.use_distributed_optimizer else 1


def static_bytes(mine: Held, sizes: ParallelSizes, work: Workload) -> int:
    """Return the bytes of weights, gradients, main weights and moments of a rank, a lower bound of its memory."""
    return sum(item.bytes for item in _static(mine, sizes, work))
