"""Weights over a directory that trainer and servers share: a Hugging Face checkpoint per version, removed when read."""

import asyncio
import errno
import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from areal_like.core.errors import WeightUpdateError, WorkerError
from areal_like.core.rollout.http import Deadline
from areal_like.core.rollout.pool import ServerPool
from areal_like.core.rollout.server import Server
from areal_like.core.trainer.remote import Trainer
from areal_like.core.weights import SyncSpec, with_those_left

NO_SPACE = os.strerror(errno.ENOSPC)  # Python and safetensors use the same words


@dataclass(eq=False)
class DiskSync:
    """`weight_update.mode: disk`. Servers generate while the checkpoint is written to the spec's directory."""

    trainer: Trainer
    pool: ServerPool
    spec: SyncSpec

    async def connect(self) -> None:
        """Prepare nothing: each update stands alone."""

    async def send(self, version: int, deadline: Deadline) -> None:
        """Write the checkpoint, load it on every server, and remove it however that ends."""
        path = self.spec.directory / str(version)

        async def load(server: Server) -> None:
            await server.load(str(path), version, deadline.left)

        await send_once(self.pool, self.trainer.save_hf, path, load, version, deadline)


async def send_once(
    pool: ServerPool,
    save: Callable[..., Awaitable[object]],
    path: Path,
    load: Callable[[Server], Awaitable[None]],
    version: int,
    deadline: Deadline,
) -> None:
    """Call the trainer's `save` with `path` and `load` of every server, and remove the files in any case."""
    try:
        try:
            await save(path, phase="weight update (send)", timeout_s=deadline.left)
        except WorkerError as error:
            raise_if_full(error, version, path.parent)
            raise

        async def load_everywhere() -> None:
            async with pool.interrupt(version, deadline) as servers:
                await asyncio.gather(*map(load, servers))

        await with_those_left(pool, deadline, load_everywhere)
    finally:
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)


def raise_if_full(error: WorkerError, version: int, directory: Path) -> None:
    """Raise WeightUpdateError if a rank failed because the disk of `directory` is full."""
    if NO_SPACE in error.cause:
        raise WeightUpdateError(
            f"weights of version {version} do not fit on the disk of {directory}: make room there, or"
            f" write weight_update.mode=collective, which needs no disk ({error.cause.splitlines()[0]})"
        ) from error
