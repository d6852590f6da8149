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

    The trainer's ranks gather as many buckets at once as they may hold on every GPU, the first time while the servers
    generate. What goes over HTTP is a handle of the memory, and no tensor.
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
        """Lend all buckets, as many at once as may be held; the last request carries the version."""
        await with_those_left(self.pool, deadline, lambda: self._send(version, deadline))

    async def _send(self, version: int, deadline: Deadline) -> None:
        first, *later = self.spec.held(self._buckets)
        await self._prepare(first, deadline)
        body = await self._lend(first, version, deadline)
        async with self.pool.interrupted(version, deadline) as servers:
            for following in [*later, range(0)]:
                await asyncio.gather(
                    *(server.update("/update_weights_from_ipc", body, deadline.left) for server in servers),
                    *([self._prepare(following[:1], deadline)] if following else []),
                )
                if following[1:]:  # there is room for them now
                    await self.trainer.transfer("end", timeout_s=deadline.left)
                    await self._prepare(following[1:], deadline)
                if following:
                    body = await self._lend(following, version, deadline)
        await self.trainer.transfer("end", timeout_s=deadline.left)

    async def _prepare(self, buckets: range, deadline: Deadline) -> None:
        await self.trainer.transfer("prepare", buckets.start, len(buckets), timeout_s=deadline.left)

    async def _lend(self, buckets: range, version: int, deadline: Deadline) -> dict[str, Any]:
        """What tells servers of these buckets, which the trainer lends from now on."""
        loans = await self.trainer.transfers("lend", self.spec.directory / "ipc", timeout_s=deadline.left)
        layouts = [
            [(tensor.name, tensor.dtype, tensor.shape) for tensor in self._buckets[number]] for number in buckets
        ]
        handles = {LOAN_LAYOUT: json.dumps(layouts)} | {name: json.dumps(of_it) for name, of_it in filter(None, loans)}
        last = buckets.stop == len(self._buckets)
        return {"zmq_handles": handles, "flush_cache": False, "weight_version": str(version) if last else None}
