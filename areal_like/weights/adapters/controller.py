"""Adapters alone over a directory that trainer and servers share; the servers' model never changes."""

import asyncio
import shutil
from dataclasses import dataclass

from areal_like.errors import WorkerError
from areal_like.rollout.pool import ServerPool
from areal_like.rollout.sglang.http import Deadline
from areal_like.trainer.remote import Trainer
from areal_like.weights.disk.controller import raise_if_full
from areal_like.weights.sync import SyncSpec, with_those_left


@dataclass(eq=False)
class AdapterSync:
    """`weight_update.adapters`. Servers generate while the adapter is written to the spec's directory."""

    trainer: Trainer
    pool: ServerPool
    spec: SyncSpec

    async def connect(self) -> None:
        """Prepare nothing: each update stands alone."""

    async def send(self, version: int, deadline: Deadline) -> None:
        """Write the adapter, have every server replace its own, and remove the file however that ends."""
        path = self.spec.directory / f"adapter-{version}"
        try:
            try:
                await self.trainer.save_adapters(path, phase="weight update (send)", timeout_s=deadline.left)
            except WorkerError as error:
                raise_if_full(error, version, self.spec.directory)
                raise

            async def load() -> None:
                async with self.pool.interrupt(version, deadline) as servers:
                    await asyncio.gather(
                        *(server.load_adapter(str(path), version, deadline.left) for server in servers)
                    )

            await with_those_left(self.pool, deadline, load)
        finally:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
