"""Checksums of the weights that a server received, against the trainer's (`weight_update.checksum`).

Both sides add up the tensors under their Hugging Face names, each on the device that it is on.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_AT_ONCE = 1 << 24  # numbers; sums are made of them as 64-bit integers
_PERIOD = 65521  # after which weights of the sum recur; a prime, so that rows of a matrix do not change places unseen


def checksum(tensor: Tensor) -> Tensor:
    """Return a sum of a tensor's bits, each place with its own weight, as a 64-bit integer on its device."""
    numbers = tensor.detach().contiguous().flatten()
    bits = numbers.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[numbers.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _AT_ONCE):
        part = bits[start : start + _AT_ONCE].long()
        places = torch.arange(start, start + len(part), device=bits.device) % _PERIOD + 1
        total += (part * places).sum()
    return total


def numbers(checksums: Mapping[str, Tensor]) -> dict[str, int]:
    """Return checksums on the host, waiting for a device once."""
    values = torch.stack(list(checksums.values())).tolist() if checksums else []
    return dict(zip(checksums, values, strict=True))
