"""Copies of tensors in host memory that is reused: new memory costs more than the copy."""

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor


class HostCopies:
    """Copies that checkpoints are written from while training changes the tensors themselves."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Tensor] = {}

    def take(self, tensors: Mapping[Hashable, Tensor]) -> dict[Hashable, Tensor]:
        """Return a contiguous copy of each tensor by name, valid until the next call; shared memory is copied once."""
        before, self._kept = self._kept, {}
        copies: dict[Hashable, Tensor] = {}
        done: dict[Hashable, Tensor] = {}
        for name, tensor in tensors.items():
            memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if memory not in done:
                copy = before.get(name)
                if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                done[memory] = self._kept[name] = copy.copy_(tensor.detach(), non_blocking=True)
            copies[name] = done[memory]
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return copies
