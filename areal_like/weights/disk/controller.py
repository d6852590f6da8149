"""Weights over a directory that trainer and servers share: a Hugging Face checkpoint per version, removed when read."""

from __future__ import annotations

import asyncio
import shutil

from areal_like.rollout.pool import ServerPool
from areal_like.rollout.sglang.http import Deadline
from areal_like.trainer.remote import Trainer
from areal_like.weights.sync import SyncSpec


class DiskSync:
    """`weight_update.mode: disk`. Generation goes on while the checkpoint is written, below the spec's directory."""

    def __init__(self, trainer: Trainer, pool: ServerPool, spec: SyncSpec) -> None:
        self._trainer = trainer
        self._pool = pool
        self._spec = spec

    async def connect(self) -> None:
        """Nothing lasts longer than one update here."""

    async def send(self, version: int) -> None:
        """Write, load everywhere, acknowledge; the checkpoint is removed however that ends."""
        deadline = Deadline(self._spec.timeout_s)
        path = self._spec.directory / str(version)
        try:
            await self._trainer.save_hf(path, phase="weight update (send)", timeout_s=deadline.left)
            body = {"model_path": str(path), "weight_version": str(version), "flush_cache": True}
            async with self._pool.interrupted(version, deadline):
                await asyncio.gather(
                    *(server.update("/update_weights_from_disk", body, deadline.left) for server in self._pool.servers)
                )
        finally:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
