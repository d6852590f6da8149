"""Sinks beside a kernel that knows none, and whose sums have no gradient, as the kernel for GPUs."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from areal_like.backends.training.kernel_attention import kernel_attention
from areal_like.backends.training.packed_attention import group_by_length, padded_attention

ENDS = torch.tensor([0, 5, 12, 13], dtype=torch.int32)
HEADS, SIZE = 4, 8


class AuxRequest(NamedTuple):
    lse: bool = False


def varlen_attn(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *_: Any, scale: float, window_size: tuple[int, int],
    return_aux: AuxRequest | None = None,
) -> Any:  # fmt: skip
    """Stand in for torch's kernel, on a CPU."""
    owner = torch.repeat_interleave(torch.arange(len(ends) - 1), ends.diff())
    back = torch.arange(len(q))[:, None] - torch.arange(len(q))
    seen = (owner[:, None] == owner) & (back >= 0) & ((back <= window_size[0]) if window_size[0] >= 0 else True)
    scores = (torch.einsum("ihd,jhd->hij", q, k) * scale).masked_fill(~seen, -torch.inf)
    output = torch.einsum("hij,jhd->ihd", scores.softmax(2), v)
    return (output, scores.logsumexp(2).detach()) if return_aux else output


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    module = ModuleType("torch.nn.attention.varlen")
    module.AuxRequest, module.varlen_attn = AuxRequest, varlen_attn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def tensors(value_size: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(13, HEADS, SIZE), (13, 2, SIZE), (13, 2, value_size), (HEADS,)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("value_size", [SIZE, SIZE - 2])
def test_outputs_and_gradients_are_those_of_plain_attention(window, sinks, value_size):
    groups = group_by_length(ENDS, ENDS)
    q, k, v, s = ours = tensors(value_size)
    found = kernel_attention(q, k, v, (ENDS, ENDS), (7, 7), None, window, s if sinks else None)
    *plain_qkv, t = plain = tensors(value_size)
    expected = padded_attention(*plain_qkv, groups, None, window, t if sinks else None)
    torch.testing.assert_close(found, expected)
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for one, other in zip(ours[: 3 + sinks], plain[: 3 + sinks], strict=True):
        torch.testing.assert_close(one.grad, other.grad)
