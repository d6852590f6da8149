"""Weights over a directory that trainer and servers share: a Hugging Face checkpoint per version, removed when read."""

import asyncio
import shutil
from dataclasses import dataclass

from areal_like.rollout.pool import ServerPool
from areal_like.rollout.sglang.http import Deadline
from areal_like.trainer.remote import Trainer
from areal_like.weights.sync import SyncSpec, with_those_left


@dataclass(eq=False)
class DiskSync:
    """`weight_update.mode: disk`. Generation goes on while the checkpoint is written, below the spec's directory."""

    trainer: Trainer
    pool: ServerPool
    spec: SyncSpec

    async def connect(self) -> None:
        """Nothing lasts longer than one update here."""

    async def send(self, version: int) -> None:
        """Write, load everywhere, acknowledge; the checkpoint is removed however that ends."""
        deadline = Deadline(self.spec.timeout_s)
        path = self.spec.directory / str(version)
        try:
            await self.trainer.save_hf(path, phase="weight update (send)", timeout_s=deadline.left)
            body = {"model_path": str(path), "weight_version": str(version), "flush_cache": False}

            async def load() -> None:
                async with self.pool.interrupted(version, deadline) as servers:
                    await asyncio.gather(
                        *(server.update("/update_weights_from_disk", body, deadline.left) for server in servers)
                    )

            await with_those_left(self.pool, load)
        finally:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
