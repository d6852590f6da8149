"""Weights on the device: each server rank reads them out of the memory of the trainer rank on its own GPU."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_like.rollout.pool import ServerPool
from areal_like.rollout.sglang import LOAN_LAYOUT
from areal_like.rollout.sglang.http import Deadline
from areal_like.trainer.remote import Trainer
from areal_like.weights.sync import SyncSpec, TensorSpec, limited, with_those_left


@dataclass(eq=False)
class IpcSync:
    """`weight_update.mode: ipc`, for servers all of whose GPUs hold a trainer rank too; nothing crosses host or disk.

    The trainer's ranks gather buckets on every GPU, the first ones while the servers generate, each further one while
    they load what came before. What goes over HTTP is a handle of the memory, and no tensor.
    """

    trainer: Trainer
    pool: ServerPool
    spec: SyncSpec
    _buckets: Sequence[Sequence[TensorSpec]] = field(default=(), init=False)

    async def connect(self) -> None:
        """Learn which tensors there are."""
        limit = self.spec.timeout_s
        async with limited(f"the layout of the weights for {type(self).__name__}", limit):
            self._buckets = await self.trainer.transfer("layout", self.spec.bucket_mb, timeout_s=limit)

    async def send(self, version: int, deadline: Deadline) -> None:
        """Lend the first buckets, and then one after the other; the last one carries the version."""
        await with_those_left(self.pool, deadline, lambda: self._send(version, deadline))

    async def _send(self, version: int, deadline: Deadline) -> None:
        first, count = self.spec.ahead(self._buckets), len(self._buckets)
        for number in range(first):
            await self._prepare(number, deadline)
        body = await self._lend(0, first, version, deadline)
        async with self.pool.interrupted(version, deadline) as servers:
            for end in range(first, count + 1):
                await asyncio.gather(
                    *(server.update("/update_weights_from_ipc", body, deadline.left) for server in servers),
                    *([self._prepare(end, deadline)] if end < count else []),
                )
                if end < count:
                    body = await self._lend(end, end + 1, version, deadline)
        await self.trainer.transfer("end", timeout_s=deadline.left)

    async def _prepare(self, number: int, deadline: Deadline) -> None:
        await self.trainer.transfer("prepare", number, timeout_s=deadline.left)

    async def _lend(self, start: int, end: int, version: int, deadline: Deadline) -> dict[str, Any]:
        """What tells servers of these buckets, which the trainer lends from now on."""
        loans = await self.trainer.transfers("lend", self.spec.directory / "ipc", timeout_s=deadline.left)
        layouts = [
            [(tensor.name, tensor.dtype, tensor.shape) for tensor in bucket] for bucket in self._buckets[start:end]
        ]
        handles = {LOAN_LAYOUT: json.dumps(layouts)} | {name: json.dumps(of_it) for name, of_it in filter(None, loans)}
        last = end == len(self._buckets)
        return {"zmq_handles": handles, "flush_cache": False, "weight_version": str(version) if last else None}
