"""Parameters, gradients and optimizer state of a rank, each on its device or in host memory.

A part leaves the device storage by storage: the bytes are copied to the host, and the storage is resized to 0. Tensors
and views stay the same objects, as Megatron's buffers, FSDP's shards and optimizers need (the method of
`_ParamAndGradBuffer.offload_to_cpu`, megatron-core 0.19.2, for every part and backend).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from areal_like.core.trainer.engine import PARTS, Part

_BLOCK = 256 << 20  # bytes; torch rounds pinned memory up to a power of two


class DeviceMemory:
    """A tracker of an engine's parts on the device, which moves them out and back.

    `tensors` returns a part's current tensors; a tensor that shares memory with an earlier part belongs to that part.
    Parts of `resting` are on the device only while they are needed.
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
        self._hosts: dict[Part, list[Tensor]] = {part: [] for part in PARTS}  # kept, because pinning is slow
        self.offload(resting)

    def tensors(self, part: Part) -> Iterable[Tensor]:
        """Return the current tensors of a part."""
        return self._tensors[part]()

    def offload(self, parts: Iterable[Part] = PARTS) -> None:
        """Free the device memory of the parts; their content, except gradients, moves to the host."""
        leaving = [part for part in PARTS if part in parts and part not in self._away]
        if not leaving:  # avoids a wait for the device
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
        """Move the parts back, except parts that rest on the host; gradients return as zeros."""
        self._bring([part for part in parts if part not in self._resting])

    @contextmanager
    def hold(self, *parts: Part) -> Iterator[None]:
        """Hold the parts on the device during the body; offloaded parts are offloaded again afterwards."""
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
                    bytes_of(storage).zero_()
            if part != "grads":
                self._copy(part, to_host=False)
            del self._away[part]
        if coming:
            self._synchronize()

    def _storages(self, part: Part) -> list[UntypedStorage]:
        """Return the storages on the device that belong only to this part."""
        earlier = {
            storage: None for other in PARTS[: PARTS.index(part)] for storage in self._on_device(self._tensors[other]())
        }
        own = dict.fromkeys(self._on_device(self._tensors[part]()))
        return [storage for storage in own if storage not in earlier]

    def _on_device(self, tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
        with torch.no_grad():
            locals_ = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        storages = (tensor.untyped_storage() for tensor in locals_ if tensor.device.type == self._device.type)
        # on the CPU, a storage shared with NumPy cannot be resized, but is in host memory anyway
        return (storage for storage in storages if self._device.type != "cpu" or storage.resizable())

    def _copy(self, part: Part, *, to_host: bool) -> None:
        blocks, on_gpu = self._hosts[part], self._device.type == "cuda"
        for number, start, block, place, size in _spans(self._sizes[part]):
            if block == len(blocks):
                blocks.append(torch.empty(_BLOCK, dtype=torch.uint8, pin_memory=on_gpu))
            host = blocks[block][place : place + size]
            device = bytes_of(self._away[part][number])[start : start + size]
            target, source = (host, device) if to_host else (device, host)
            target.copy_(source, non_blocking=on_gpu)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def memory_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage on this rank."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage().data_ptr()


def bytes_of(storage: UntypedStorage) -> Tensor:
    """Return a whole storage, `[bytes]`."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _spans(sizes: Sequence[int]) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the layout of storages of these sizes in blocks: storage, start, block, position in the block, length."""
    total = 0
    for number, size in enumerate(sizes):
        start = 0
        while start < size:
            block, place = divmod(total, _BLOCK)
            length = min(size - start, _BLOCK - place)
            yield number, start, block, place, length
            start, total = start + length, total + length
