"""Copies of tensors in host memory that is kept for the next ones: memory that is new costs more than the copy."""

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopies:
    """What checkpoints are written from while training changes the tensors themselves."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.Size, tuple[int, ...], torch.dtype], Tensor] = {}

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A contiguous copy of each, good until the next call; one for tensors that are the same memory."""
        before, self._kept = self._kept, {}
        places = [(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        for place, tensor in zip(places, tensors, strict=True):
            if place not in self._kept:
                copy = before[place] if place in before else torch.empty(tensor.shape, dtype=tensor.dtype)
                self._kept[place] = copy.copy_(tensor.detach())
        return [self._kept[place] for place in places]
