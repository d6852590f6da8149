"""Packed causal attention for transformers' models, under the name `packed`.

A model receives one row of tokens and the ends of its sequences. On GPUs torch's variable-length kernel computes the
attention; on a CPU, and with soft caps, padded groups do. Ranks that share a pack's tokens compute some heads each
(`fsdp/ulysses.py`).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from areal_like.backends.fsdp import ulysses
from areal_like.backends.training.kernel_attention import kernel_attention
from areal_like.backends.training.packed_attention import SequenceGroup, group_by_length, padded_attention
from areal_like.backends.training.packed_delta_net import sequence_numbers
from areal_like.core.trainer.device_batch import DeviceBatch

NAME = "packed"


@dataclass(frozen=True)
class Pieces:
    """Pieces of a pack: their ends and the longest one, for queries and for keys; `places` are the keys' places in it.

    `places` is None if each piece attends to itself alone.
    """

    ends: tuple[Tensor, Tensor]
    longest: tuple[int, int]
    places: Tensor | None

    @cached_property
    def groups(self) -> list[SequenceGroup]:
        """The pieces in groups of similar length, for padded attention."""
        return group_by_length(*self.ends)


def register() -> None:
    """Make `attn_implementation="packed"` known to transformers; it needs no mask."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    *,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    pieces: Pieces,
    sharing: dist.ProcessGroup | None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention of `query`, `key`, `value` `[1, heads, t, dim]` as `[1, t, heads, dim]`, for transformers.

    A token attends to the `sliding_window` last tokens of its sequence, itself among them, None: to all of them.
    `s_aux` `[heads]` are the scores of sinks, which take their share of the attention and have no value. `softcap`
    bounds scores.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if sharing is not None:
        q, k, v = (ulysses.to_heads(x, sharing) for x in (q, k, v))
        s_aux = None if s_aux is None else s_aux.chunk(sharing.size())[sharing.rank()]
    if pieces.places is not None:
        k, v = (x.index_select(0, pieces.places) for x in (k, v))
    if query.device.type == "cpu" or softcap:
        output = padded_attention(q, k, v, pieces.groups, scaling, sliding_window, s_aux, softcap)
    else:
        output = kernel_attention(q, k, v, pieces.ends, pieces.longest, scaling, sliding_window, s_aux)
    return (output if sharing is None else ulysses.to_tokens(output, sharing))[None], None


def arguments(micro_batch: DeviceBatch, sharing: dist.ProcessGroup | None) -> dict[str, Any]:
    """Return the arguments of a model beside tokens and positions, which ranks may share."""
    ends, longest, keys = micro_batch.cu_seqlens, micro_batch.max_seqlen, micro_batch.keys
    of_keys = ends if keys is None else keys.cu_seqlens
    most = longest if keys is None else keys.max_seqlen
    pieces = Pieces((ends, of_keys), (longest, most), keys and keys.places)
    return {"pieces": pieces, "sharing": sharing, "cu_seq_lens_q": ends, "seq_idx": sequence_numbers(ends)[None]}
