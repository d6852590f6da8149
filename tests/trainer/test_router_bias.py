"""A router's bias in bfloat16, beside a product that reads every bias as its output's type, as cuBLASLt's does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

from areal_like.trainer.megatron.bridges.own_layers import router_logits

TOKENS, SIZE, EXPERTS = 6, 8, 4


def product(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, layout: str, bias: Any = None, grad: bool = False) -> Any:
    """Stand in for Transformer Engine's `general_gemm`, whose matrices are those of Fortran."""
    left, right = (x.to(out_dtype) for x in (b, a))
    output = (left.t() if layout[1] == "T" else left) @ (right.t() if layout[0] == "T" else right)
    if bias is not None:
        read = torch.cat([bias.detach(), torch.zeros_like(bias)]).view(out_dtype)
        output = output + read[: len(bias)]
    return (output,)


def logits_and_gradients(function: Any) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((TOKENS, SIZE), (EXPERTS, SIZE), (EXPERTS,))
    tensors = [torch.randn(shape).to(torch.bfloat16).requires_grad_() for shape in shapes]
    logits = function(*tensors, torch.float32)
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return [logits, *(tensor.grad for tensor in tensors)]


def plain(tokens: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    return tokens.to(dtype) @ weight.to(dtype).t() + bias.to(dtype)


@pytest.fixture(autouse=True)
def transformer_engine(monkeypatch):
    monkeypatch.setattr(moe_utils, "te_general_gemm", product)


def test_logits_and_gradients_are_those_of_torch():
    for found, expected in zip(logits_and_gradients(router_logits), logits_and_gradients(plain), strict=True):
        torch.testing.assert_close(found, expected)  # by data type: logits in float32, gradients in bfloat16


def test_megatrons_own_function_misreads_the_bias():
    found, expected = (logits_and_gradients(each)[0] for each in (moe_utils.router_gating_linear, plain))
    assert (found - expected).abs().max() > 0.1
