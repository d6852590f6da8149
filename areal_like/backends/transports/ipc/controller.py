"""Weights on the device: each server rank reads them out of the memory of the trainer rank on its own GPU."""

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from areal_like.core.rollout.http import Deadline
from areal_like.core.rollout.pool import ServerPool
from areal_like.core.rollout.server import Server
from areal_like.core.trainer.remote import Trainer
from areal_like.core.transfer import EXPORT_LAYOUT
from areal_like.core.weights import SyncSpec, TensorSpec, layout, time_limit, with_those_left


@dataclass(eq=False)
class IpcSync:
    """`weight_update.mode: ipc`, for servers all of whose GPUs hold a trainer rank too; nothing crosses host or disk.

    On every GPU the trainer's ranks gather as much as they may hold at once, `prefetch_mb`, the first time while the
    servers generate. It is one bucket, since every further handle takes a server time. Only that handle of the memory
    goes over HTTP, and no tensor.
    """

    trainer: Trainer
    pool: ServerPool
    spec: SyncSpec
    _buckets: Sequence[Sequence[TensorSpec]] = field(default=(), init=False)

    async def connect(self) -> None:
        """Learn which tensors there are."""
        limit = self.spec.timeout_s
        async with time_limit("reading the layout of the weights (weight_update.mode=ipc)", limit):
            size = max(self.spec.bucket_mb, self.spec.prefetch_mb)
            self._buckets = await self.trainer.transfer("layout", size, timeout_s=limit)

    async def send(self, version: int, deadline: Deadline) -> None:
        """Export one bucket after the other; the last one carries the version."""
        await with_those_left(self.pool, deadline, lambda: self._send(version, deadline))

    async def _send(self, version: int, deadline: Deadline) -> None:
        servers = self.pool.servers  # a server that joins from here on has no exporting rank yet
        handles = await self._export(0, servers, deadline)
        async with self.pool.interrupt(version, deadline, servers):
            for following in range(1, len(self._buckets) + 1):
                last = version if following == len(self._buckets) else None
                await asyncio.gather(*(server.open_exported(handles, last, deadline.left) for server in servers))
                if following < len(self._buckets):
                    handles = await self._export(following, servers, deadline)
        await self.trainer.transfer("end", timeout_s=deadline.left)

    async def _export(self, number: int, servers: Sequence[Server], deadline: Deadline) -> Mapping[str, str]:
        """Gather and export one bucket, and no other; return its handles and layout, as servers read them."""
        ranks, directory = self._exporters(servers), self.spec.directory / "ipc"
        handles = await self.trainer.transfers("export", number, directory, ranks, timeout_s=deadline.left)
        return {EXPORT_LAYOUT: json.dumps(layout(self._buckets[number])), **dict(filter(None, handles))}

    def _exporters(self, servers: Sequence[Server]) -> Collection[int] | None:
        """Return the trainer's ranks beside a present server; memory that no process opens would never be released."""
        by_server = self.spec.exporters
        if not by_server:
            return None
        return {rank for server in servers if server.rank is not None for rank in by_server[server.rank]}
