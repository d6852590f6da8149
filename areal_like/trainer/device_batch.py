"""One rank's share of packed micro-batches as tensors on its device, a micro-batch at a time."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_like.trainer.packing import MicroBatch
from areal_like.types import Batch


@dataclass(frozen=True)
class DeviceKeys:
    """`packing.Keys` on the device."""

    places: Tensor
    cu_seqlens: Tensor
    max_seqlen: int


@dataclass(frozen=True)
class DeviceBatch:
    """One rank's share of a micro-batch on the device, t tokens of which n predict a wanted token.

    `tokens` and `positions` are `[1, t]`; `cu_seqlens` `[pieces + 1]`, `max_seqlen`, `keys` are `packing.MicroBatch`'s.
    `rows` are the n places that predict, `labels` the tokens they predict, `sequences` the numbers of these tokens'
    sequences in the batch, and each of `fields` the batch's values there, all `[n]`; `count` is n.
    """

    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    rows: Tensor
    labels: Tensor
    sequences: Tensor
    fields: Mapping[str, Tensor]
    count: Tensor
    keys: DeviceKeys | None = None


@dataclass(frozen=True)
class DeviceBatches:
    """Micro-batches that are packed and copied when an iterator reaches them, while the device computes the one before.

    Each of several iterators copies its own; `pack` gives the i-th of `count` and remembers it. `wanted` is
    `[tokens of the batch]`, where a prediction is to be looked at.
    """

    count: int
    pack: Callable[[int], MicroBatch]
    batch: Batch
    wanted: NDArray[np.bool]
    device: torch.device

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[DeviceBatch]:
        return (to_device(pack, self.batch, self.wanted, self.device) for pack in map(self.pack, range(self.count)))

    @property
    def targets(self) -> NDArray[np.int64]:
        """The places in the batch of all labels, in the order of the micro-batches."""
        packs = map(self.pack, range(self.count))
        return np.concatenate([pack.targets[self.wanted[pack.targets]] for pack in packs])


def generated(batch: Batch) -> NDArray[np.bool]:
    """Return where log-probs are of use, `[tokens]`: what a policy generated, or everything in other batches."""
    mask = batch.fields.get("loss_mask")
    return np.ones(len(batch.tokens), bool) if mask is None else mask > 0


def to_device(pack: MicroBatch, batch: Batch, wanted: NDArray[np.bool], device: torch.device) -> DeviceBatch:
    """Copies a micro-batch; `wanted` is DeviceBatches's."""
    here = wanted[pack.targets]
    rows, targets = pack.rows[here], pack.targets[here]

    def copied(array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        # from pageable memory the host would wait for the copy, and so for all kernels that were launched before it
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    keys = pack.keys
    return DeviceBatch(
        tokens=copied(pack.tokens)[None],
        positions=copied(pack.positions)[None],
        cu_seqlens=copied(pack.cu_seqlens),
        max_seqlen=pack.max_seqlen,
        rows=copied(rows),
        labels=copied(batch.tokens[targets].astype(np.int64)),
        sequences=copied(np.repeat(np.arange(len(batch.lengths)), batch.lengths)[targets]),
        fields={name: copied(values[targets]) for name, values in batch.fields.items() if name != "loss_mask"},
        count=copied(np.array(len(rows), np.int32)),
        keys=None if keys is None else DeviceKeys(copied(keys.places), copied(keys.cu_seqlens), keys.max_seqlen),
    )
