"""Megatron-core's gated delta nets without flash-linear-attention: in plain torch, slowly."""

from typing import Any

import torch
from megatron.core.ssm.gated_delta_net import common, gdn
from torch import Tensor

from areal_like.backends.training.packed_delta_net import causal_convolution, packed_delta_rule, sequence_numbers


def install() -> None:
    """Make torch compute gated delta nets, unless flash-linear-attention is installed."""
    if common.HAVE_FLA:
        return
    common.HAVE_FLA, common.l2norm = True, _l2norm
    gdn.causal_conv1d, gdn.chunk_gated_delta_rule = _convolution, _delta_rule


def _l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, cu_seqlens: Tensor, **unused: Any
) -> tuple[Tensor, None]:
    """Convolve `x` `[1, t, channels]`; flash-linear-attention's arguments."""
    numbers = sequence_numbers(cu_seqlens)
    return causal_convolution(x.transpose(1, 2), weight, bias, numbers).transpose(1, 2), None


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **unused: Any
) -> tuple[Tensor, None]:
    return packed_delta_rule(common.torch_chunk_gated_delta_rule, q, k, v, g, beta, cu_seqlens), None
