"""Transformer Engine's modules in plain torch, with its class and parameter names.

A model therefore has the same layers, weight names and checkpoint layout on CPU and GPU, and both bridges map it in the
same way. Megatron's own local layers support neither packed sequences nor context parallelism.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, SequentialMLP, TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.parameter import Parameter

from areal_like.backends.megatron.plain_attention import PlainAttention


class TENorm(torch.nn.Module):
    """RMSNorm or LayerNorm, as the config requires."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, has_residual: bool = False
    ) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        self.weight, self.bias = _norm_parameters(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return _norm(self.config, x, self.weight, self.bias, self.eps)


class TELinear(torch.nn.Module):
    """A linear layer that is replicated on every tensor-parallel rank: the compressions of latent attention."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str,
        config: TransformerConfig,
        init_method: Any,
        bias: bool,
        **unused: Any,
    ) -> None:
        super().__init__()
        if bias or parallel_mode != "duplicated":
            raise ValueError(f"TELinear on the CPU has no bias ({bias}) and no parallel_mode {parallel_mode}")
        self.parallel_mode = parallel_mode  # Megatron Bridge maps the weight by it
        self.weight = Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # read by finalize_model_grads
        init_method(self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """A norm and the column-parallel linear layer behind it."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight, self.layer_norm_bias = _norm_parameters(config, input_size)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = _norm(self.config, x, self.layer_norm_weight, self.layer_norm_bias, self.config.layernorm_epsilon)
        return super().forward(x, *args, **kwargs)


def _norm_parameters(config: TransformerConfig, size: int) -> tuple[Parameter, Parameter | None]:
    def parameter(value: float) -> Parameter:
        p = Parameter(torch.full((size,), value, dtype=config.params_dtype))
        p.sequence_parallel = config.sequence_parallel  # read by finalize_model_grads
        return p

    weight = parameter(0.0 if config.layernorm_zero_centered_gamma else 1.0)
    return weight, parameter(0.0) if config.normalization == "LayerNorm" else None


def _norm(config: TransformerConfig, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if config.layernorm_zero_centered_gamma:
        weight = weight + 1
    if config.normalization == "LayerNorm":
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


class TEDotProductAttention(PlainAttention):
    """`PlainAttention` with the class name that Megatron Bridge needs to map its sinks."""


def rotary_embedding_of_pack(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    cp_group: Any = None,
) -> Tensor:
    """Return the rotary embedding of a whole pack in one call; Megatron's unfused form loops over its sequences.

    Shapes: `t` `[t, heads, dim]`, `freqs` `[longest sequence, 1, 1, dim]`.
    """
    cp, rank = cp_group.size(), cp_group.rank()
    starts, lengths = cu_seqlens[:-1].long() // cp, cu_seqlens.diff().long() // cp
    position = torch.arange(len(t)) - starts.repeat_interleave(lengths)
    if cp > 1:
        chunk = (lengths // 2).repeat_interleave(lengths)
        position = position + torch.where(position < chunk, rank, 2 * cp - 2 - rank) * chunk
    return _apply_rotary_pos_emb_bshd(
        t.unsqueeze(1), freqs[position], rotary_interleaved, mla_rotary_interleaved, mscale
    ).squeeze(1)


class _GroupedLinear(torch.nn.Module):
    """The same linear layer of several experts: parameters weight0, weight1, ... `[out, in]`."""

    axis: int  # the dimension that expert tensor parallelism splits

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Any,
        bias: bool,
        skip_bias_add: bool,
        pg_collection: Any,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self.pg, self.has_bias, self.returns_bias = num_gemms, pg_collection, bias, skip_bias_add
        shape = [output_size, input_size]
        shape[self.axis] //= self.pg.expt_tp.size()
        for i in range(num_gemms):
            weight = Parameter(torch.empty(shape, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(weight, True, self.axis, 1)
            weight.allreduce = not _has_own_groups(config)
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                init_method(weight)
            self.register_parameter(f"weight{i}", weight)
            if bias:
                added = Parameter(torch.zeros(shape[0], dtype=config.params_dtype))
                set_tensor_model_parallel_attributes(added, self.axis == 0, 0, 1)
                added.allreduce = weight.allreduce
                self.register_parameter(f"bias{i}", added)

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        """Compute `x` `[tokens, in]` sorted by expert, `m_splits[i]` of them for expert i."""
        parts = x.split([int(n) for n in m_splits])
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)] if self.has_bias else None
        added = [None] * self.num_gemms if biases is None or self.returns_bias else biases
        outputs = [F.linear(part, getattr(self, f"weight{i}"), added[i]) for i, part in enumerate(parts)]
        return torch.cat(outputs), biases if self.returns_bias else None

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are never delayed here."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return keys and offsets as in Megatron's extensions/transformer_engine.py, `_sharded_state_dict_grouped`."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        n_experts = self.pg.ep.size() * self.num_gemms
        sharded: dict[str, Any] = {}
        for i in range(self.num_gemms):
            expert = self.pg.ep.rank() * self.num_gemms + i
            kinds = ["weight", "bias"] if self.has_bias else ["weight"]
            one = make_sharded_tensors_for_checkpoint(
                {**{kind: getattr(self, f"{kind}{i}") for kind in kinds}, "_extra_state": None},
                prefix,
                {"weight": self.axis} | ({"bias": 0} if self.axis == 0 else {}),
                (*sharded_offsets, (len(sharded_offsets), expert, n_experts)),
                tp_group=self.pg.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            sharded |= {f"{prefix}{kind}{i}": one[f"{prefix}{kind}"] for kind in kinds}
            sharded[f"{prefix}_extra_state{i or ''}"] = one[f"{prefix}_extra_state"]
        for entry in sharded.values():
            entry.replica_id = (*entry.replica_id[:2], self.pg.expt_dp.rank())
        return sharded


def _has_own_groups(config: TransformerConfig) -> bool:
    """Return whether expert and dense gradients are reduced over different ranks (`use_expert_pgs` in Megatron)."""
    return (
        config.expert_model_parallel_size > 1 or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
    )


class TEColumnParallelGroupedLinear(_GroupedLinear):
    """The experts' first layer, split along its outputs."""

    axis = 0


class TERowParallelGroupedLinear(_GroupedLinear):
    """The experts' second layer, split along its inputs."""

    axis = 1


class TESpecProvider(BackendSpecProvider):
    """Mapping of modules, the counterpart of `megatron.core.extensions.transformer_engine_spec_provider` on a GPU."""

    def linear(self) -> type:
        """Build a projection of latent attention."""
        return TELinear

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return TELayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        return TENorm

    def core_attention(self) -> type:
        return TEDotProductAttention

    def activation_func(self) -> None:
        return None

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        if not moe_use_grouped_gemm:
            one = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear, activation_func=None)
            return partial(SequentialMLP, submodules=one)
        submodules = GroupedMLPSubmodules(
            linear_fc1=TEColumnParallelGroupedLinear, linear_fc2=TERowParallelGroupedLinear, activation_func=None
        )
        return partial(TEGroupedMLP, submodules=submodules)
