"""A trainer as the controller sees it: one object whose ranks are Ray actors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from areal_like.cluster.workers import WorkerGroup
from areal_like.types import Batch, Floats, LossSpec


@dataclass(frozen=True)
class TensorSpec:
    """A Hugging Face tensor that the trainer can send; `dtype` as torch spells it without `torch.`."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Trainer:
    """All ranks of one trainer. Every rank gets the same call; what they compute together is assembled here."""

    def __init__(self, ranks: WorkerGroup) -> None:
        self._ranks = ranks

    async def log_probs(self, batch: Batch, temperature: float) -> Floats:
        """Log-probs of the batch's tokens under the current weights, `[tokens]`."""
        parts = await self._ranks.call_all("log_probs", batch, temperature, phase="log-probs")
        result = np.zeros(len(batch.tokens), np.float32)
        for indices, values in filter(None, parts):
            result[indices] = values
        return result

    async def train(
        self, batch: Batch, loss: LossSpec, temperature: float, learning_rate: float | None = None
    ) -> dict[str, float]:
        """One optimizer step on the whole batch; returns loss, grad_norm, lr and the loss's own statistics."""
        return (await self._ranks.call_all("train", batch, loss, temperature, learning_rate, phase="training"))[0]

    async def save_hf(self, path: Path) -> None:
        """Write a Hugging Face checkpoint that transformers loads."""
        await self._ranks.call_all("save_hf", path, phase="saving")

    async def open_weight_store(self, world_size: int, group: str, timeout_s: float) -> tuple[str, int]:
        """Listen on rank 0 for the weight update group; returns address and port."""
        return await self._ranks.call_one(0, "open_weight_store", world_size, group, timeout_s, phase="weight update")

    async def join_weight_group(self, backend: str) -> None:
        """Join the weight update group as its rank 0; returns when every server rank has joined."""
        await self._ranks.call_one(0, "join_weight_group", backend, phase="weight update")

    async def weight_buckets(self, bucket_mb: int) -> Sequence[Sequence[TensorSpec]]:
        """What `broadcast_weights` will send, bucket by bucket."""
        return (await self._ranks.call_all("weight_buckets", bucket_mb, phase="weight update"))[0]

    async def broadcast_weights(self, bucket_mb: int) -> None:
        """Send every bucket through the weight update group, from rank 0."""
        await self._ranks.call_all("broadcast_weights", bucket_mb, phase="weight update")
