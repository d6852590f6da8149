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

    The trainer's ranks gather a bucket on every GPU, the first one while the servers generate, each further one while
    they load the one before. What goes over HTTP is a handle of the memory, and no tensor.
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
        """Lend bucket after bucket; the last one carries the version."""
        await with_those_left(self.pool, deadline, lambda: self._send(version, deadline))

    async def _send(self, version: int, deadline: Deadline) -> None:
        await self.trainer.transfer("prepare", 0, timeout_s=deadline.left)
        async with self.pool.interrupted(version, deadline) as servers:
            for number, bucket in enumerate(self._buckets):
                last = number + 1 == len(self._buckets)
                body = await self._lend(number, bucket, str(version) if last else None, deadline)
                await asyncio.gather(
                    *(server.update("/update_weights_from_ipc", body, deadline.left) for server in servers),
                    *(() if last else (self.trainer.transfer("prepare", number + 1, timeout_s=deadline.left),)),
                )
            await self.trainer.transfer("end", timeout_s=deadline.left)

    async def _lend(
        self, number: int, bucket: Sequence[TensorSpec], version: str | None, deadline: Deadline
    ) -> dict[str, Any]:
        directory = self.spec.directory / "ipc"
        loans = await self.trainer.transfers("lend", directory, number, timeout_s=deadline.left)
        layout = [(tensor.name, tensor.dtype, tensor.shape) for tensor in bucket]
        handles = {LOAN_LAYOUT: json.dumps(layout), **dict(loan for loan in loans if loan)}
        return {"zmq_handles": handles, "flush_cache": False, "weight_version": version}
