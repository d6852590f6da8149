"""Weights by broadcast: buckets of tensors through one process group of trainer rank 0 and every server rank."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

from areal_like.errors import WorkerError
from areal_like.rollout.pool import ServerPool
from areal_like.rollout.sglang.http import AFTERMATH_S, Deadline, Server
from areal_like.trainer.remote import TensorSpec, Trainer
from areal_like.weights.sync import limited

GROUP = "areal_like_weights"


class CollectiveSync:
    """`weight_update.mode: collective`, over nccl between GPUs and over gloo otherwise."""

    def __init__(
        self,
        trainer: Trainer,
        pool: ServerPool,
        *,
        ranks_per_server: int,
        backend: str,
        bucket_mb: int,
        timeout_s: float,
    ) -> None:
        self._trainer = trainer
        self._pool = pool
        self._ranks_per_server = ranks_per_server
        self._backend = backend
        self._bucket_mb = bucket_mb
        self._timeout_s = timeout_s
        self._buckets: Sequence[Sequence[TensorSpec]] = ()

    async def connect(self) -> None:
        """Form the process group: rank 0 is the trainer's, then the servers' ranks in order."""
        world_size = 1 + self._ranks_per_server * len(self._pool.servers)
        address, port = await self._trainer.open_weight_store(world_size, GROUP, self._timeout_s)
        joined = [
            server.update(
                "/init_weights_update_group",
                {
                    "master_address": address,
                    "master_port": port,
                    "rank_offset": 1 + index * self._ranks_per_server,
                    "world_size": world_size,
                    "group_name": GROUP,
                    "backend": self._backend,
                },
                self._timeout_s,
            )
            for index, server in enumerate(self._pool.servers)
        ]
        async with limited(f"connecting trainer and servers over {type(self).__name__}", self._timeout_s):
            await _together(self._trainer.join_weight_group(self._backend), *joined)
            self._buckets = await self._trainer.weight_buckets(self._bucket_mb)

    async def send(self, version: int) -> None:
        """Broadcast bucket after bucket; the last one carries the version."""
        deadline = Deadline(self._timeout_s)
        async with self._pool.interrupted(version, deadline):
            await _together(
                self._trainer.broadcast_weights(self._bucket_mb),
                *(self._receive(server, version, deadline) for server in self._pool.servers),
            )

    async def _receive(self, server: Server, version: int, deadline: Deadline) -> None:
        for bucket in self._buckets:
            last = bucket is self._buckets[-1]
            body = {
                "names": [tensor.name for tensor in bucket],
                "dtypes": [tensor.dtype for tensor in bucket],
                "shapes": [list(tensor.shape) for tensor in bucket],
                "group_name": GROUP,
                "load_format": "flattened_bucket",
                "flush_cache": last,
                "weight_version": str(version) if last else None,
            }
            await server.update("/update_weights_from_distributed", body, deadline.left)


async def _together(*ends: Awaitable[None]) -> None:
    """Wait for all ends of a collective, the trainer's first.

    When one end fails the others do too, and not always later. A trainer rank that died is told first, then what a
    server says; that a server died is told by its watcher, which cancels this meanwhile.
    """
    tasks = [asyncio.ensure_future(end) for end in ends]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if _failures(tasks):
            await asyncio.wait(tasks, timeout=AFTERMATH_S)
        failures = _failures(tasks)
        deaths = [error for error in failures if isinstance(error, WorkerError) and not error.remote_traceback]
        for error in deaths or failures[::-1]:
            raise error
    finally:
        for task in tasks:
            task.cancel()


def _failures(tasks: Sequence[asyncio.Future[None]]) -> list[BaseException]:
    errors = [task.exception() for task in tasks if task.done()]
    return [error for error in errors if error is not None]
