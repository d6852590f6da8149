"""Weights as files that trainer and servers share: a full copy every few versions, and deltas to the version before."""

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

from areal_like.errors import WorkerError
from areal_like.events import note
from areal_like.rollout.pool import ServerPool
from areal_like.rollout.sglang.http import Deadline
from areal_like.trainer.remote import Trainer
from areal_like.weights.disk.controller import raise_if_full
from areal_like.weights.sync import SyncSpec, with_those_left


@dataclass(eq=False)
class DeltaSync:
    """`weight_update.mode: disk` with `full_every` above 1. Servers generate while a file is written.

    The files since the last full copy stay: a server that joins late or missed a version reads those that it lacks.
    """

    trainer: Trainer
    pool: ServerPool
    spec: SyncSpec
    _files: list[tuple[Path, str]] = field(default_factory=list, init=False)  # and their SHA-256

    async def connect(self) -> None:
        """Prepare nothing: the first update writes a full copy."""

    async def send(self, version: int, deadline: Deadline) -> None:
        """Write one file, have every server load the weights after it, and remove files before a full copy."""
        outdated = await self._write(version, deadline)
        files = [(str(path), sha256) for path, sha256 in self._files]

        async def load() -> None:
            async with self.pool.interrupt(version, deadline) as servers:
                await asyncio.gather(*(server.load_files(files, version, deadline.left) for server in servers))

        await with_those_left(self.pool, deadline, load)
        for path in outdated:
            await asyncio.to_thread(path.unlink, missing_ok=True)

    async def _write(self, version: int, deadline: Deadline) -> list[Path]:
        """Write the next file; return those that no server needs any more."""
        start, path = time.time(), self.spec.directory / f"{version}-{secrets.token_hex(4)}.safetensors"
        after = self._files[-1][0].name if 0 < len(self._files) < self.spec.full_every else None
        try:
            written = await self.trainer.transfer("write", path, after, timeout_s=deadline.left)
        except WorkerError as error:
            raise_if_full(error, version, self.spec.directory)
            raise
        note("weights", "file", start, version=version, bytes=written.bytes, weights=written.weights)
        outdated = [file for file, _ in self._files] if written.is_full else []
        if written.is_full:
            self._files.clear()
        self._files.append((path, written.sha256))
        return outdated
