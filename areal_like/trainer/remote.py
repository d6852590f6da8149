"""A trainer as the controller sees it: one object whose ranks are Ray actors."""

from pathlib import Path
from typing import Any

import numpy as np

from areal_like.cluster.workers import WorkerGroup
from areal_like.types import Batch, Floats, LossSpec


class Trainer:
    """All ranks of one trainer. Every rank gets the same call; what they compute together is assembled here."""

    def __init__(self, ranks: WorkerGroup) -> None:
        self._ranks = ranks

    async def log_probs(self, batch: Batch, temperature: float) -> Floats:
        """Log-probs of the batch's tokens under the current weights, `[tokens]`."""
        parts = await self._ranks.call_all("engine", "log_probs", batch, temperature, phase="log-probs")
        result = np.zeros(len(batch.tokens), np.float32)
        for indices, values in filter(None, parts):
            result[indices] = values
        return result

    async def train(
        self, batch: Batch, loss: LossSpec, temperature: float, learning_rate: float | None = None
    ) -> dict[str, float]:
        """One optimizer step on the whole batch; returns loss, grad_norm, lr and the loss's own statistics."""
        arguments = (batch, loss, temperature, learning_rate)
        return (await self._ranks.call_all("engine", "train", *arguments, phase="training"))[0]

    async def save_hf(self, path: Path, *, phase: str = "saving", timeout_s: float | None = None) -> None:
        """Write a Hugging Face checkpoint that transformers loads."""
        await self._ranks.call_all("engine", "save_hf", path, phase=phase, timeout=timeout_s)

    async def transfer(self, step: str, *arguments: Any, timeout_s: float) -> Any:
        """One step of a CollectiveSender on every rank; returns rank 0's answer.

        Raises WorkerError, which names the ranks that did not end it in time.
        """
        phase = f"weight update ({step})"
        return (await self._ranks.call_all("transfer", step, *arguments, phase=phase, timeout=timeout_s))[0]
