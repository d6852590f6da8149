"""Gated delta nets of qwen3_next and qwen3_5 on a CPU in plain PyTorch: SGLang 0.5.17 has kernels for AMX alone.

The functions take the arguments of SGLang's kernels of the same names. The rules are those of transformers, as in the
trainer. A request's convolution and state are kept in its slot of SGLang's pools, `[slots, channels, tokens before]`
and `[slots, value heads, value size, key size]`.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from areal_like.rollout.sglang.patches.inside.cpu_attention import similar_sequences


def add_kernels() -> None:
    """Have SGLang's imports find these functions where its own kernels would be."""
    os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")
    functions: list[Callable[..., Any]] = [causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu]
    operators: list[Callable[..., Any]] = [
        fused_gdn_gating_cpu,
        fused_sigmoid_gating_delta_rule_update_cpu,
        fused_sigmoid_mul_cpu,
        fused_qk_gemma_rmsnorm_cpu,
        fused_qk_gemma_rmsnorm_with_gate_cpu,
        fused_qkvzba_split_reshape_cat_contiguous_cpu,
    ]
    module = sys.modules["sgl_kernel.mamba"] = types.ModuleType("sgl_kernel.mamba")
    for function in functions:
        setattr(module, function.__name__, function)
    for operator in operators:
        setattr(torch.ops.sgl_kernel, operator.__name__, operator)


def replace_norms() -> None:
    """Replace the gated norms, which SGLang computes by Triton on a CPU too."""
    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
    from sglang.kernels.ops.attention.fla.layernorm_gated import RMSNorm

    for norm in (FusedRMSNormGated, RMSNorm):
        norm.forward = _normalise_gated


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: Any,
) -> Tensor:
    """Convolve the tokens of new or continued sequences, `[channels, tokens]` as `x`."""
    before, output = weight.shape[1] - 1, torch.empty_like(x)
    rows = zip(cache_indices.tolist(), has_initial_state.tolist(), pairwise(query_start_loc.tolist()), strict=True)
    for slot, continued, (start, end) in rows:
        first = conv_states[slot].to(x.dtype) if continued else x.new_zeros(len(x), before)
        whole = torch.cat([first, x[:, start:end]], 1)
        output[:, start:end] = F.conv1d(whole[None], weight[:, None], bias, groups=len(x))[0]
        conv_states[slot] = whole[:, whole.shape[1] - before :]
    return _activate(output, activation)


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: Tensor,
) -> Tensor:
    """Convolve one more token of each sequence, `[sequences, channels]` as `x`."""
    slots = conv_state_indices.long()
    whole = torch.cat([conv_states[slots].to(x.dtype), x[..., None]], 2)
    conv_states[slots] = whole[..., 1:].to(conv_states.dtype)
    output = (whole * weight).sum(2)
    return _activate(output if bias is None else output + bias, activation)


def fused_gdn_gating_cpu(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithm of each token's decay and the weight of what it writes, `[1, tokens, value heads]`."""
    return (-A_log.float().exp() * F.softplus(a.float() + dt_bias))[None], b.sigmoid()[None]


def chunk_gated_delta_rule_cpu(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    head_first: bool,
) -> tuple[Tensor, None, None]:
    """Read and write the states of sequences token by token, `[1, tokens, value heads, value size]` as `v`.

    Sequences of similar lengths share a call. Their padding neither decays nor writes.
    """
    starts, lengths, output = cu_seqlens[:-1].long(), cu_seqlens.diff().long(), torch.empty_like(v)
    sizes = [(length, length) for length in lengths.tolist()]
    for sequences in similar_sequences(sizes, v[0, 0].numel(), q[0, 0].numel() + k[0, 0].numel()):
        chosen = torch.tensor(sequences)
        length, slots = lengths[chosen, None], initial_state_indices[chosen].long()
        places = torch.arange(int(length.max()))
        tokens, real = starts[chosen, None] + places.minimum(length - 1), places < length
        query, key, value = (x[0, tokens] for x in (_repeat(q, v), _repeat(k, v), v))
        found, states = torch_chunk_gated_delta_rule(
            query,
            key,
            value,
            g=g[0, tokens] * real[..., None],
            beta=beta[0, tokens] * real[..., None],
            initial_state=initial_state[slots].transpose(2, 3),
            output_final_state=True,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )
        output[0, tokens[real]] = found[real]
        initial_state[slots] = states.transpose(2, 3).to(initial_state.dtype)
    return output, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> Tensor:
    """Read and write the states for one more token of each sequence, `[1, sequences, value heads, value size]`."""
    slots = initial_state_indices.long()
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    query, key, value, g, beta = (x.transpose(0, 1) for x in (_repeat(q, v), _repeat(k, v), v, g, beta))
    output, states = torch_recurrent_gated_delta_rule(
        query,
        key,
        value,
        g=g,
        beta=beta,
        initial_state=initial_state_source[slots].transpose(2, 3),
        output_final_state=True,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )
    initial_state_source[slots] = states.transpose(2, 3).to(initial_state_source.dtype)
    return output.transpose(0, 1)


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor, inplace: bool) -> Tensor:
    """Return `x` `[tokens, channels]` weighted by its gates."""
    return x * gate.reshape(x.shape).sigmoid()


def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Normalise each head of queries and keys, `[tokens · heads, head size]`."""
    pairs = ((q, q_weight), (k, k_weight))
    query, key = (_normalise(x.reshape(-1, head_dim), 1 + weight.float(), eps) for x, weight in pairs)
    return query, key


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Separate the gate that follows each head's query, and normalise queries and keys."""
    q, gate = q_gate.reshape(len(q_gate), num_heads, 2 * head_dim).chunk(2, 2)
    return *fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim), gate.reshape(len(q_gate), -1)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_size: int, value_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Separate what qwen3_5 projects in two calls: what is convolved, the output's gate, and both gates of the rule."""
    values = value_heads * value_size
    mixed, z = qkvz.split([2 * key_heads * key_size + values, values], -1)
    b, a = ba.split([value_heads, value_heads], -1)
    return mixed.contiguous(), z.reshape(len(z), value_heads, value_size), b.contiguous(), a.contiguous()


def _normalise_gated(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    """Normalise `x` and weight it by its gate, as the gated norms of transformers do."""
    activate = torch.sigmoid if getattr(self, "activation", None) == "sigmoid" else F.silu
    return (_normalise(x, self.weight, self.eps) * activate(gate.float())).to(x.dtype)


def _normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    exact = x.float()
    return (weight * (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


def _activate(x: Tensor, activation: str | None) -> Tensor:
    return F.silu(x) if activation in ("silu", "swish") else x


def _repeat(x: Tensor, v: Tensor) -> Tensor:
    """Repeat queries or keys for the value heads that share them."""
    return x.repeat_interleave(v.shape[2] // x.shape[2], 2)
