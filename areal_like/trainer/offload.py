"""Parameters, gradients and optimizer state of a rank, each on its device or in host memory.

A part leaves the device by its storages: their bytes are copied to the host, and the storages are resized to 0. Tensors
stay the objects that they were, and so do views among them, as Megatron's buffers, FSDP's shards and optimizers have
them (the way of `_ParamAndGradBuffer.offload_to_cpu`, megatron-core 0.19.2, for every part and backend).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from areal_like.trainer.engine import PARTS, Part

_BLOCK = 256 << 20  # bytes; torch rounds pinned memory up to a power of two


class DeviceMemory:
    """Tracker of the parts of an engine on its device, which moves them out and back.

    `tensors` gives those of a part at the time; a tensor that shares memory with an earlier part's is that one's. Parts
    of `resting` are on the device only while they are needed.
    """

    def __init__(
        self,
        device: torch.device,
        tensors: Mapping[Part, Callable[[], Iterable[Tensor]]],
        resting: Collection[Part] = (),
    ) -> None:
        self._device, self._tensors, self._resting = device, tensors, resting
        self._away: dict[Part, list[UntypedStorage]] = {}
        self._sizes: dict[Part, list[int]] = {}
        self._hosts: dict[Part, list[Tensor]] = {part: [] for part in PARTS}  # kept, as pinning takes long
        self.offload(resting)

    def offload(self, parts: Iterable[Part] = PARTS) -> None:
        """Free the device memory of the parts; what is in it, but for gradients, waits on the host."""
        leaving = [part for part in PARTS if part in parts and part not in self._away]
        if not leaving:  # the host need not wait for the device
            return
        self._synchronize()
        for part in leaving:
            storages = self._storages(part)
            self._away[part], self._sizes[part] = storages, [storage.nbytes() for storage in storages]
            if part != "grads":
                self._copy(part, to_host=True)
        self._synchronize()
        for storage in (storage for part in leaving for storage in self._away[part]):
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self, parts: Iterable[Part] = PARTS) -> None:
        """Bring the parts back, but for those that rest on the host; gradients come back as zeros."""
        self._bring([part for part in parts if part not in self._resting])

    @contextmanager
    def hold(self, *parts: Part) -> Iterator[None]:
        """Have the parts on the device; those that were away are away again afterwards."""
        away = [part for part in parts if part in self._away]
        self._bring(away)
        try:
            yield
        finally:
            self.offload(away)

    def _bring(self, parts: Iterable[Part]) -> None:
        coming = [part for part in PARTS if part in parts and part in self._away]
        for part in coming:
            for storage, size in zip(self._away[part], self._sizes[part], strict=True):
                storage.resize_(size)
                if part == "grads":
                    _bytes(storage).zero_()
            if part != "grads":
                self._copy(part, to_host=False)
            del self._away[part]
        if coming:
            self._synchronize()

    def _storages(self, part: Part) -> list[UntypedStorage]:
        """Return the storages on the device that are this part's alone."""
        earlier = {
            storage: None for other in PARTS[: PARTS.index(part)] for storage in self._on_device(self._tensors[other]())
        }
        own = dict.fromkeys(self._on_device(self._tensors[part]()))
        return [storage for storage in own if storage not in earlier]

    def _on_device(self, tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
        with torch.no_grad():
            locals_ = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        storages = (tensor.untyped_storage() for tensor in locals_ if tensor.device.type == self._device.type)
        # on the CPU one that NumPy has seen stays where it is, which is host memory
        return (storage for storage in storages if self._device.type != "cpu" or storage.resizable())

    def _copy(self, part: Part, *, to_host: bool) -> None:
        blocks, on_gpu = self._hosts[part], self._device.type == "cuda"
        for number, start, block, place, size in _spans(self._sizes[part]):
            if block == len(blocks):
                blocks.append(torch.empty(_BLOCK, dtype=torch.uint8, pin_memory=on_gpu))
            host = blocks[block][place : place + size]
            device = _bytes(self._away[part][number])[start : start + size]
            target, source = (host, device) if to_host else (device, host)
            target.copy_(source, non_blocking=on_gpu)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _bytes(storage: UntypedStorage) -> Tensor:
    """Return all of a storage, `[bytes]`."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _spans(sizes: Sequence[int]) -> Iterator[tuple[int, int, int, int, int]]:
    """Return where storages of these sizes lie in blocks, one by one: storage, start, block, place in it, length."""
    total = 0
    for number, size in enumerate(sizes):
        start = 0
        while start < size:
            block, place = divmod(total, _BLOCK)
            length = min(size - start, _BLOCK - place)
            yield number, start, block, place, length
            start, total = start + length, total + length
