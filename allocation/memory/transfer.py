"""Transfers between GPUs: NCCL's buffers, and weights on their way to the servers."""

from __future__ import annotations

from allocation.model_spec import ModelSpec
from allocation.parameters import total_parameters
from allocation.plan import ParallelSizes
from allocation.settings import Workload


def communicators(sizes: ParallelSizes) -> int:
    """Return the number of NCCL communicators with more than one rank."""
    s = sizes
    return sum(size > 1 for size in (s.tp, s.cp, s.pp, s.dp * s.cp, s.ep * s.etp, s.edp if s.ep * s.etp > 1 else 1))


def largest_gathered(model: ModelSpec, sizes: ParallelSizes, work: Workload) -> int:
    """Return the bytes of the largest weight under its Hugging Face name, gathered from all ranks that hold a part."""
    if max(sizes.tp, sizes.pp, sizes.etp) > 1:
        return 2 * largest_weight(model, work)
    return 2 * model.hidden_size * model.expert_ffn * work.memory.item if sizes.ep > 1 else 0


def largest_weight(model: ModelSpec, work: Workload) -> int:
    """Return bytes of the largest weight under its Hugging Face name."""
    widest = max(model.vocab_size, model.ffn, model.query_width)
    return model.hidden_size * widest * work.memory.item


def bucket(model: ModelSpec, work: Workload) -> int:
    """Return the bytes sent in one batch: at most all weights, at least one."""
    everything = total_parameters(model) * work.memory.item
    return max(min(work.memory.bucket_bytes, everything), largest_weight(model, work))


def buckets(model: ModelSpec, work: Workload) -> int:
    """Return the bytes that a trainer rank holds in its buckets, which are gathered before servers pause."""
    everything = total_parameters(model) * work.memory.item
    return max(min(work.memory.ahead_bytes, everything), bucket(model, work))
