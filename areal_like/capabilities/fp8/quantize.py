"""Weights in FP8 as SGLang rounds them: blocks of 128 x 128, and a power of two as the scale of each."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from allocation.memory.fp8 import BLOCK

if TYPE_CHECKING:
    from torch import Tensor

_LINEAR = re.compile(r"\.layers\.\d+\.(?:self_attn|mlp(?:\.(experts)\.\d+)?)\.(\w+_proj)\.weight$")
_LARGEST, _LEAST = 448.0, 1e-4  # of float8_e4m3fn, and of a block, which may be all zeros


def is_quantized(name: str, layers: Collection[str]) -> bool:
    """Return whether the tensor of this Hugging Face name belongs to one of the kinds of `layers`."""
    found = _LINEAR.search(name)
    return found is not None and (found[1] or found[2]) in layers


def quantize_weights(weights: Iterable[tuple[str, Tensor]], layers: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights as the servers hold them: for one of `layers` its FP8 numbers, then its scales."""
    for name, tensor in weights:
        if not is_quantized(name, layers):
            yield name, tensor
            del tensor  # before the next is gathered
            continue
        numbers, scales = quantize(tensor)
        del tensor
        yield name, numbers
        del numbers
        yield f"{name}_scale_inv", scales
        del scales


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the FP8 numbers of a weight, `[rows, columns]`, and float32 scales, `[rows / 128, columns / 128]`.

    A weight is its number times its block's scale, the least power of two with which the block's largest fits.
    """
    import torch

    rows, columns = (size // BLOCK for size in weight.shape)
    blocks = weight.detach().contiguous().view(rows, BLOCK, columns, BLOCK)
    largest = blocks.abs().amax((1, 3), keepdim=True).float().clamp(_LEAST) / _LARGEST
    mantissa, exponent = torch.frexp(largest)  # mantissa from 0.5 up to 1
    scales = torch.ldexp(torch.ones_like(largest), exponent - (mantissa == 0.5).int())
    numbers = (blocks * (1 / scales)).to(torch.float8_e4m3fn)
    return numbers.view(weight.shape), scales.view(rows, columns)
