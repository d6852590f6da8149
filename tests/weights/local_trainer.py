"""A trainer without ranks: it has the weights of a Hugging Face directory and sends them as rank 0 does."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file
from torch.distributed import destroy_process_group

from areal_like.trainer.remote import TensorSpec
from areal_like.weights.collective.rank import Broadcaster, specs

BUCKETS = 3


class LocalTrainer:
    def __init__(self, model: Path) -> None:
        self.model = model
        self.saved: list[Path] = []
        self._broadcaster = Broadcaster()

    async def save_hf(self, path: Path) -> None:
        shutil.copytree(self.model, path)
        self.saved.append(path)

    async def open_weight_store(self, world_size: int, group: str, timeout_s: float) -> tuple[str, int]:
        return self._broadcaster.open_store("127.0.0.1", world_size, group, timeout_s + 1)

    async def join_weight_group(self, backend: str) -> None:
        await asyncio.to_thread(self._broadcaster.join, backend)

    async def weight_buckets(self, bucket_mb: int) -> Sequence[Sequence[TensorSpec]]:
        return specs(self._buckets())

    async def broadcast_weights(self, bucket_mb: int) -> None:
        await asyncio.to_thread(self._broadcaster.send, self._buckets())

    def leave(self) -> None:
        """Leave the group, so that the next trainer of this process can make one of the same name."""
        destroy_process_group(self._broadcaster._group)

    def _buckets(self) -> list:
        tensors = list(load_file(self.model / "model.safetensors").items())
        return [tensors[start::BUCKETS] for start in range(BUCKETS)]
