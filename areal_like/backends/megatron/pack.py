"""Micro-batches as input of Megatron's attention, including sequences that share a prompt, and positions of images.

Megatron-core 0.19 does not support packs with shared prompts, nor positions in time, height and width (M-RoPE) in a
pack. It treats such a pack as one sequence, except in the rotary embedding, which uses each token's own positions, and
in attention, which gathers shared keys and values and receives the actual pieces. With context parallelism and shared
prompts each rank gathers the keys and values of all ranks: Transformer Engine's ring passes on chunks of a sequence,
but a piece's keys may be anywhere in the pack.
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

from areal_like.backends.megatron.mtp import WithNextTokens
from areal_like.core.trainer.device_batch import DeviceBatch

# a piece's last query attends to all keys; Transformer Engine's name, for which Megatron has no AttnMaskType
_LAST_TO_ALL = SimpleNamespace(name="padding_causal_bottom_right")


@dataclass
class OwnPositions(PackedSeqParams):
    """A pack as one sequence, whose `pieces` attention receives.

    `positions` are `[t]` of all ranks, or `[3, t]` of this rank; `places` `[keys]` belong to the pieces' keys, None
    if these are the pieces' own.
    """

    positions: Tensor | None = None
    places: Tensor | None = None
    pieces: PackedSeqParams | None = None


def pack_of(micro_batch: DeviceBatch) -> PackedSeqParams:
    """Return Megatron's parameters of a micro-batch; OwnPositions need a model prepared by `use_positions`."""
    ends, longest, keys = micro_batch.cu_seqlens, micro_batch.max_seqlen, micro_batch.keys
    of_images = micro_batch.positions[1:, 0] if micro_batch.positions.ndim == 3 else None
    if micro_batch.ahead is not None:  # alone: prompts are not shared, and there are no images
        return _thd(WithNextTokens, ends, longest, ends, longest, next_tokens=micro_batch.ahead.tokens)
    if keys is None:
        pieces = _thd(PackedSeqParams, ends, longest, ends, longest)
        if of_images is None:
            return pieces
        total = micro_batch.tokens.shape[1] * _context_size()
        whole = ends[:: len(ends) - 1].contiguous()  # Transformer Engine's rotary kernel ignores strides
        return _thd(OwnPositions, whole, total, whole, total, positions=of_images, pieces=pieces)
    total = len(keys.positions)
    cp = total // micro_batch.tokens.shape[1]
    alone = {"local_cp_size": 1} if cp > 1 else {}  # attention on one rank, which has gathered all keys
    pieces = _thd(PackedSeqParams, ends, longest, keys.cu_seqlens, keys.max_seqlen, **alone)
    whole = ends[:: len(ends) - 1] * cp
    positions = keys.positions if of_images is None else of_images
    return _thd(OwnPositions, whole, total, whole, total, positions=positions, places=keys.places, pieces=pieces)


def _context_size() -> int:
    size: int = parallel_state.get_context_parallel_world_size()
    return size


def _thd[P: PackedSeqParams](kind: type[P], q: Tensor, longest_q: int, kv: Tensor, longest_kv: int, **more: Any) -> P:
    return kind(
        qkv_format="thd", cu_seqlens_q=q, cu_seqlens_kv=kv, max_seqlen_q=longest_q, max_seqlen_kv=longest_kv, **more
    )


def use_positions(models: Iterable[torch.nn.Module], axes: Tensor | None, *, shared: bool) -> None:
    """Enable packs with OwnPositions in models, each Megatron's GPTModel on any pipeline stage.

    `axes` `[frequencies]` is the position, of several, that rotates each frequency; None with one position. Raises
    ValueError if prompts are `shared` and the model has recurrent states, which sequences cannot share.
    """
    for model in models:
        if shared and model.config.experimental_attention_variant == "gated_delta_net":
            raise ValueError("gated delta nets cannot share prompts; write mb_spec.share_prompts=false")
        model.decoder.register_forward_pre_hook(partial(_with_positions, axes), with_kwargs=True)
        for name, module in model.decoder.named_modules():
            if name.endswith(".core_attention"):
                module.register_forward_pre_hook(_with_gathered_keys, with_kwargs=True)
            if name.endswith(".self_attention") and not hasattr(module, "core_attention"):  # a gated delta net
                module.register_forward_pre_hook(_with_pieces, with_kwargs=True)
            if isinstance(module, MultiLatentAttention):
                module.register_forward_pre_hook(_note_positions, with_kwargs=True)
                module.rotary_pos_emb.register_forward_hook(partial(_select_positions, module))


def _with_positions(
    axes: Tensor | None, _: Any, arguments: tuple, named: Mapping[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    pack, rotary = named.get("packed_seq_params"), named.get("rotary_pos_emb")
    if not isinstance(pack, OwnPositions) or pack.positions is None or rotary is None:
        return arguments, dict(named)
    if axes is None:
        own = rotary[pack.positions]
    else:
        own = _in_chunks(_turn(rotary[:, 0, 0], pack.positions, axes), len(rotary))[:, None, None]
    return arguments, {**named, "rotary_pos_emb": own}


def _turn(rotary: Tensor, positions: Tensor, axes: Tensor) -> Tensor:
    """Return this rank's rotary embedding `[t, 2 * frequencies]` from the embedding of all positions, and `positions`
    `[3, t]`.

    Each frequency is there twice.
    """
    chosen = positions.index_select(0, axes.to(positions.device).repeat(2))
    return rotary.gather(0, chosen.T)


def _in_chunks(own: Tensor, total: int) -> Tensor:
    """Return a rank's rows at the places, among `total`, where Megatron looks for them: it takes two chunks of 2 * cp.

    The rows of other ranks are zeros.
    """
    if len(own) == total:
        return own
    rank, chunks = parallel_state.get_context_parallel_rank(), 2 * _context_size()
    whole = list(own.new_zeros(total, own.shape[1]).chunk(chunks))
    whole[rank], whole[chunks - 1 - rank] = own.chunk(2)
    return torch.cat(whole)


def _with_gathered_keys(_: Any, arguments: tuple, named: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
    pack = named.get("packed_seq_params")
    if not isinstance(pack, OwnPositions) or pack.places is None:
        return _with_pieces(_, arguments, named)
    query, key, value, *others = arguments
    group = parallel_state.get_context_parallel_group()
    if group.size() > 1:
        key, value = (gather_from_sequence_parallel_region(states, group=group) for states in (key, value))
    gathered = (states.index_select(0, pack.places) for states in (key, value))
    told = {"packed_seq_params": pack.pieces, "attn_mask_type": _LAST_TO_ALL}
    return (query, *gathered, *others), {**named, **told}


def _with_pieces(_: Any, arguments: tuple, named: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
    pack = named.get("packed_seq_params")
    return arguments, {**named, "packed_seq_params": pack.pieces if isinstance(pack, OwnPositions) else pack}


def _note_positions(attention: torch.nn.Module, arguments: tuple, named: Mapping[str, Any]) -> None:
    """Store a pack's positions for the rotary embedding, which latent attention computes itself."""
    pack = named.get("packed_seq_params")
    attention._positions = pack.positions if isinstance(pack, OwnPositions) else None


def _select_positions(attention: torch.nn.Module, _: Any, arguments: tuple, rotary: Tensor) -> Tensor:
    return rotary if attention._positions is None else rotary[attention._positions]
