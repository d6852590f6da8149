"""One rank's share of a packed micro-batch as tensors on its device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_like.trainer.packing import NO_TARGET, MicroBatch
from areal_like.types import Batch


@dataclass(frozen=True)
class DeviceBatch:
    """One rank's share of a micro-batch on the device, t tokens of which n predict a wanted token.

    `tokens` and `positions` are `[1, t]`; `cu_seqlens` `[sequences + 1]` and `max_seqlen` are `packing.MicroBatch`'s.
    `rows` are the n places that predict, `labels` the tokens they predict, `sequences` the numbers of these tokens'
    sequences in the batch, and each of `fields` the batch's values there, all `[n]`; `targets` are the labels' places
    in the batch, on the host; `count` is n.
    """

    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    rows: Tensor
    labels: Tensor
    sequences: Tensor
    fields: Mapping[str, Tensor]
    targets: NDArray[np.int64]
    count: Tensor


def to_device(pack: MicroBatch, batch: Batch, wanted: NDArray[np.bool], device: torch.device) -> DeviceBatch:
    """Copies a micro-batch; `wanted` is `[tokens of the batch]`, where a prediction is to be looked at."""
    rows = np.flatnonzero((pack.targets != NO_TARGET) & wanted[pack.targets])
    targets = pack.targets[rows]

    def copied(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return DeviceBatch(
        tokens=copied(pack.tokens)[None],
        positions=copied(pack.positions)[None],
        cu_seqlens=copied(pack.cu_seqlens),
        max_seqlen=pack.max_seqlen,
        rows=copied(rows),
        labels=copied(batch.tokens[targets].astype(np.int64)),
        sequences=copied(np.searchsorted(np.cumsum(batch.lengths), targets, side="right")),
        fields={name: copied(values[targets]) for name, values in batch.fields.items() if name != "loss_mask"},
        targets=targets,
        count=torch.tensor(len(rows), dtype=torch.int, device=device),
    )
