"""Sizes of trainers and servers that divide a model."""

from __future__ import annotations

from collections.abc import Iterator

from allocation.model_spec import ModelSpec
from allocation.pipeline import EVEN, Ends, uneven_ends
from allocation.plan import ParallelSizes
from allocation.planner.task import POWERS


def trainer_sizes(model: ModelSpec, n: int, per_node: int, wanted: Ends = EVEN) -> Iterator[tuple[ParallelSizes, Ends]]:
    """Yield sizes on `n` GPUs that divide the model, with the ends of the pipeline; TP stays within a node."""
    pipelines = [(pp, ends) for pp in range(1, 17) if (ends := _ends(model.layers, pp, wanted)) is not None]
    for tp in (t for t in POWERS if t <= per_node and n % t == 0 and splits_heads(model, t)):
        for pp, ends in ((pp, ends) for pp, ends in pipelines if n % (tp * pp) == 0):
            for cp in (c for c in POWERS[:4] if n % (tp * pp * c) == 0):
                if model.linear_layers and model.linear_key_heads % (tp * cp):
                    continue
                world = n // pp
                for ep in (*POWERS, 128, 256) if model.experts else (1,):
                    if world % ep or model.experts % ep:
                        continue
                    yield ParallelSizes(tp, pp, cp, world // (tp * cp), ep, 1, world // ep), ends


def _ends(layers: int, stages: int, wanted: Ends) -> Ends | None:
    """Return the ends of a pipeline, the `wanted` ones if any; None if the layers cannot be split so."""
    if wanted == EVEN:
        return uneven_ends(layers, stages)
    given = [end for end in wanted if end is not None]
    middle, left = stages - len(given), layers - sum(given)
    fits = stages > 1 and (left > 0 and left % middle == 0 if middle else left == 0)
    return wanted if fits else None


def server_sizes(model: ModelSpec, n: int, per_node: int) -> Iterator[list[int]]:
    """Yield tensor-parallel sizes of servers on `n` GPUs: sizes within a node, then whole nodes."""
    able = [tp for tp in POWERS if n % tp == 0 and splits_heads(model, tp)]
    yield [tp for tp in able if tp <= per_node]
    yield [tp for tp in able if tp > per_node and tp % per_node == 0]


def splits_heads(model: ModelSpec, tp: int) -> bool:
    """Return whether a tensor-parallel size divides heads and feed-forward columns."""
    if model.heads % tp or model.ffn % tp or model.shared_ffn % tp:
        return False
    return model.latent_attention or model.kv_heads % tp == 0 or tp % model.kv_heads == 0
