"""Copies of tensors in host memory that is reused: new memory costs more than the copy."""

import math
from collections.abc import Hashable, Mapping

import torch
from torch import Tensor


class HostCopies:
    """Copies that checkpoints are written from while training changes the tensors themselves.

    They take at most `limit` bytes, None: as many as are needed. `complete` tells whether all tensors of the last call
    were copied; otherwise the caller has to write the others before they change.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit, self._kept = limit, dict[Hashable, Tensor]()
        self.complete = True

    def take(self, tensors: Mapping[Hashable, Tensor]) -> dict[Hashable, Tensor]:
        """Return a contiguous copy of each tensor by name, valid until the next call, or the tensor beyond the limit.

        Shared memory is copied once.
        """
        before, self._kept = self._kept, {}
        copies: dict[Hashable, Tensor] = {}
        done: dict[Hashable, Tensor] = {}
        room = math.inf if self._limit is None else self._limit
        self.complete = True
        for name, tensor in tensors.items():
            memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if memory not in done and tensor.nbytes > room:
                done[memory], self.complete = tensor.detach(), False
            elif memory not in done:
                room -= tensor.nbytes
                copy = before.get(name)
                if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                done[memory] = self._kept[name] = copy.copy_(tensor.detach(), non_blocking=True)
            copies[name] = done[memory]
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return copies
