"""Adapters alone over a directory that trainer and servers share; the servers' model never changes."""

from dataclasses import dataclass

from areal_like.rollout.pool import ServerPool
from areal_like.rollout.sglang.http import Deadline
from areal_like.rollout.sglang.server import Server
from areal_like.trainer.remote import Trainer
from areal_like.weights.disk.controller import send_once
from areal_like.weights.sync import SyncSpec


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

        async def load(server: Server) -> None:
            await server.load_adapter(str(path), version, deadline.left)

        await send_once(self.pool, self.trainer.save_adapters, path, load, version, deadline)
