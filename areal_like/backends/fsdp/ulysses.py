"""Sequence parallelism: each of n ranks has a part of a pack's tokens, but in attention all tokens of some heads.

Source: DeepSpeed Ulysses (Jacobs et al., arXiv 2309.14509).
"""

import math
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_reduce, all_to_all_single

from areal_like.core.trainer.packing import MicroBatch


def part(pack: MicroBatch, n: int, rank: int) -> MicroBatch:
    """Return the rank-th of n equal parts of a pack's tokens; values of whole sequences stay."""
    first, end = (i * len(pack.tokens) // n for i in (rank, rank + 1))
    here = (first <= pack.rows) & (pack.rows < end)
    return replace(
        pack,
        tokens=pack.tokens[first:end],
        positions=pack.positions[first:end],
        rows=pack.rows[here] - first,
        targets=pack.targets[here],
        places=pack.places[first:end],
    )


def to_heads(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange `[t / n, heads, dim]` for `[t, heads / n, dim]`: all heads of this rank's tokens for its heads of all.

    Heads that n does not divide, as few key heads, are repeated until it does. Each rank's query heads, whose number n
    has to divide, then find their key heads on it, in the usual order.
    """
    n, heads = group.size(), states.shape[1]
    if heads % n:
        states = states.repeat_interleave(math.lcm(n, heads) // heads, 1)
    return _exchange(states.unflatten(1, (n, -1)).transpose(0, 1), group).flatten(0, 1)


def to_tokens(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange `[t, heads / n, dim]` for `[t / n, heads, dim]`."""
    return _exchange(states.unflatten(0, (group.size(), -1)), group).transpose(0, 1).flatten(1, 2)


def sum_over(group: dist.ProcessGroup | None, tensor: Tensor) -> Tensor:
    """Return the sum over the ranks that share each sequence, differentiable; every one of them has to call it."""
    return tensor if group is None else all_reduce(tensor, group=group)


def _exchange(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send the i-th of n blocks to rank i and receive rank i's block; gradients return the same way."""
    blocks = blocks.contiguous()
    return all_to_all_single(torch.empty_like(blocks), blocks, group=group)
