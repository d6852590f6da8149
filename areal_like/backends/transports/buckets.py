"""The trainer's weights as buckets of bytes, which its ranks gather one after the other; imported by trainer ranks."""

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from areal_like.backends.transports.checksum import checksum
from areal_like.core.trainer.engine import TrainEngine
from areal_like.core.weights import TensorSpec


class Buckets:
    """Gathers buckets on every rank, and holds them on the sending ranks: rank 0, or with `on_each` each GPU's.

    Beside the model, memory holds the prepared buckets, `ready`, and one tensor at a time.
    """

    def __init__(self, engine: TrainEngine, rank: int, *, on_each: bool = False) -> None:
        self._engine, self._rank, self._on_each = engine, rank, on_each
        self._buckets: list[list[TensorSpec]] = []
        self._weights: Iterator[tuple[str, Tensor]] = iter(())
        self.ready: deque[Tensor] = deque()
        self.sums: dict[str, Tensor] | None = None  # checksums of the gathered weights, once requested

    def layout(self, bucket_mb: int) -> list[list[TensorSpec]]:
        """Return which tensors each bucket will hold: at most `bucket_mb` MiB of them, or one that is larger."""
        self._buckets, room = [], 0
        for name, tensor in self._engine.weights():
            if tensor.nbytes > room:
                self._buckets.append([])
                room = bucket_mb << 20
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._buckets[-1].append(TensorSpec(name, dtype, tuple(tensor.shape), tensor.nbytes))
            room -= tensor.nbytes
            del tensor  # before the next is gathered
        return self._buckets

    def prepare(self, start: int, count: int = 1) -> None:
        """Gather `count` buckets, each as one flat tensor of bytes; they come in turn from 0."""
        if start == 0:
            self._weights = self._engine.weights()
            self.ready.clear()
        for number in range(start, start + count):
            self._gather(number)

    def _gather(self, number: int) -> None:
        place, flat = 0, None
        for spec in self._buckets[number]:
            _, tensor = next(self._weights)
            if self.sums is not None:
                self.sums[spec.name] = checksum(tensor)
            if self._rank == 0 or (self._on_each and tensor.is_cuda):
                if flat is None:
                    size = sum(spec.nbytes for spec in self._buckets[number])
                    flat = torch.empty(size, dtype=torch.uint8, device=tensor.device)
                    self.ready.append(flat)
                flat[place : place + spec.nbytes] = tensor.contiguous().flatten().view(torch.uint8)
            place += spec.nbytes
            del tensor
        if number + 1 == len(self._buckets):
            for _ in self._weights:  # nothing more comes; a generator that waits would hold the last tensor
                pass
