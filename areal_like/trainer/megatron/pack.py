"""Micro-batches as input of Megatron's attention, including sequences that share a prompt.

Megatron-core 0.19 does not support packs with shared prompts. It treats such a pack as one sequence, except in the
rotary embedding, which uses each token's own position, and in attention, which gathers keys and values and receives the
actual pieces. With context parallelism each rank gathers the keys and values of all ranks: Transformer Engine's ring
passes on chunks of a sequence, but a piece's keys may be anywhere in the pack.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import Tensor

from areal_like.trainer.device_batch import DeviceBatch

# a piece's last query attends to all keys; Transformer Engine's name, for which Megatron has no AttnMaskType
_LAST_TO_ALL = SimpleNamespace(name="padding_causal_bottom_right")


@dataclass
class SharedPrompts(PackedSeqParams):
    """A pack as one sequence, described by `positions` `[t]` of all ranks, `places` `[keys]` and `pieces`."""

    positions: Tensor | None = None
    places: Tensor | None = None
    pieces: PackedSeqParams | None = None


def pack_of(micro_batch: DeviceBatch) -> PackedSeqParams:
    """Return Megatron's parameters of a micro-batch; one with keys needs a model prepared by `allow_shared`."""
    ends, longest, keys = micro_batch.cu_seqlens, micro_batch.max_seqlen, micro_batch.keys
    if keys is None:
        return _thd(PackedSeqParams, ends, longest, ends, longest)
    total = len(keys.positions)
    cp = total // micro_batch.tokens.shape[1]
    alone = {"local_cp_size": 1} if cp > 1 else {}  # attention on one rank, which has gathered all keys
    pieces = _thd(PackedSeqParams, ends, longest, keys.cu_seqlens, keys.max_seqlen, **alone)
    whole = ends[:: len(ends) - 1] * cp
    return _thd(SharedPrompts, whole, total, whole, total, positions=keys.positions, places=keys.places, pieces=pieces)


def _thd[P: PackedSeqParams](kind: type[P], q: Tensor, longest_q: int, kv: Tensor, longest_kv: int, **more: Any) -> P:
    return kind(
        qkv_format="thd", cu_seqlens_q=q, cu_seqlens_kv=kv, max_seqlen_q=longest_q, max_seqlen_kv=longest_kv, **more
    )


def allow_shared(models: Iterable[torch.nn.Module]) -> None:
    """Enable packs of `pack_of` in models, each Megatron's GPTModel on any pipeline stage.

    Raises ValueError for a model with recurrent states, which sequences cannot share.
    """
    for model in models:
        if model.config.experimental_attention_variant == "gated_delta_net":
            raise ValueError("gated delta nets cannot share prompts; write mb_spec.share_prompts=false")
        model.decoder.register_forward_pre_hook(_with_positions, with_kwargs=True)
        for name, module in model.decoder.named_modules():
            if name.endswith(".core_attention"):
                module.register_forward_pre_hook(_with_gathered_keys, with_kwargs=True)
            if isinstance(module, MultiLatentAttention):
                module.register_forward_pre_hook(_note_positions, with_kwargs=True)
                module.rotary_pos_emb.register_forward_hook(partial(_select_positions, module))


def _with_positions(_: Any, arguments: tuple, named: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
    pack, rotary = named.get("packed_seq_params"), named.get("rotary_pos_emb")
    if not isinstance(pack, SharedPrompts) or rotary is None:
        return arguments, dict(named)
    return arguments, {**named, "rotary_pos_emb": rotary[pack.positions]}


def _with_gathered_keys(_: Any, arguments: tuple, named: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
    pack = named.get("packed_seq_params")
    if not isinstance(pack, SharedPrompts) or pack.places is None:
        return arguments, dict(named)
    query, key, value, *others = arguments
    group = parallel_state.get_context_parallel_group()
    if group.size() > 1:
        key, value = (gather_from_sequence_parallel_region(states, group=group) for states in (key, value))
    gathered = (states.index_select(0, pack.places) for states in (key, value))
    told = {"packed_seq_params": pack.pieces, "attn_mask_type": _LAST_TO_ALL}
    return (query, *gathered, *others), {**named, **told}


def _note_positions(attention: torch.nn.Module, arguments: tuple, named: Mapping[str, Any]) -> None:
    """Store a pack's positions for the rotary embedding, which latent attention computes itself."""
    pack = named.get("packed_seq_params")
    attention._positions = pack.positions if isinstance(pack, SharedPrompts) else None


def _select_positions(attention: torch.nn.Module, _: Any, arguments: tuple, rotary: Tensor) -> Tensor:
    return rotary if attention._positions is None else rotary[attention._positions]
