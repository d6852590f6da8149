"""Megatron's core attention in torch: on a CPU, and where Transformer Engine's is not used (soft caps, sinks)."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.nn.parameter import Parameter

from areal_like.backends.training.kernel_attention import kernel_attention
from areal_like.backends.training.packed_attention import SequenceGroup, group_by_length, padded_attention


class PlainAttention(torch.nn.Module):
    """Causal attention over a pack of sequences; sequences of similar length share a call.

    With context parallelism each rank gathers all keys and values; queries stay where they are. It applies the layer's
    window and sinks and the config's `attn_logit_softcapping`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        unsupported = {
            "softmax_type": config.softmax_type not in ("vanilla", "learnable"),
            "attention_dropout": bool(config.attention_dropout if attention_dropout is None else attention_dropout),
        }
        if any(unsupported.values()):
            names = ", ".join(name for name, used in unsupported.items() if used)
            raise ValueError(f"attention in plain torch does not support this model's {names}")
        self.scale = config.softmax_scale if softmax_scale is None else softmax_scale
        self.cap = getattr(config, "attn_logit_softcapping", None)
        slides = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if slides else None  # includes the query itself
        groups = (parallel_state.get_context_parallel_group(), parallel_state.get_tensor_model_parallel_group())
        self.cp_group, self.tp_group = groups if pg_collection is None else (pg_collection.cp, pg_collection.tp)
        self.softmax_offset = _sinks(config, self.tp_group.size()) if config.softmax_type == "learnable" else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> Tensor:
        """Attend with this rank's `query` `[t, heads, dim]`, `key`, `value` of t or more tokens; `[t, heads * dim]`."""
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError("attention in plain torch takes packed sequences only")
        cp, cp_rank = self.cp_group.size(), self.cp_group.rank()
        if packed_seq_params.local_cp_size == 1:  # the caller has gathered keys and values
            cp, cp_rank = 1, 0
        if cp > 1:
            key = gather_from_sequence_parallel_region(key, group=self.cp_group)
            value = gather_from_sequence_parallel_region(value, group=self.cp_group)
        pack = packed_seq_params
        if query.is_cuda and cp == 1 and not self.cap:
            ends, longest = (pack.cu_seqlens_q, pack.cu_seqlens_kv), (pack.max_seqlen_q, pack.max_seqlen_kv)
            rules = (self.scale, self.window, self.softmax_offset)
            return kernel_attention(query, key, value, ends, longest, *rules).flatten(1)
        groups = _groups_of(pack, cp, cp_rank)
        how = (groups, self.scale, self.window, self.softmax_offset, self.cap)
        return padded_attention(query, key, value, *how).flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None, **unused: Any
    ) -> dict[str, Any]:
        """Return the sinks, the only parameters, split among tensor-parallel ranks like the heads."""
        if self.softmax_offset is None:
            return {}
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        state = self.state_dict(prefix="", keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups
        )
        return sharded


def _sinks(config: TransformerConfig, tp: int) -> Parameter:
    sinks = Parameter(torch.zeros(config.num_attention_heads // tp, dtype=config.params_dtype))
    set_tensor_model_parallel_attributes(sinks, True, 0, 1)
    return sinks


def _groups_of(pack: PackedSeqParams, cp: int, cp_rank: int) -> list[SequenceGroup]:
    """Return the groups, computed once and used by every layer."""
    groups = getattr(pack, "_groups", None)
    if groups is None:
        groups = pack._groups = group_by_length(pack.cu_seqlens_q, pack.cu_seqlens_kv, cp, cp_rank)
    return groups
