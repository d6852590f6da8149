"""Weights as files for the servers: a full copy every few versions, and deltas to the version before."""

import asyncio
import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path

from areal_like.backends.transports.deltas.downloads import ServerDownloads
from areal_like.backends.transports.disk.controller import raise_if_full
from areal_like.core.errors import ServerError, WorkerError
from areal_like.core.events import note, now
from areal_like.core.rollout.http import Deadline
from areal_like.core.rollout.pool import ServerPool
from areal_like.core.rollout.server import Server
from areal_like.core.trainer.remote import Trainer
from areal_like.core.transfer import Chain
from areal_like.core.weights import SyncSpec, with_those_left


@dataclass(eq=False)
class DeltaSync:
    """`weight_update.mode: disk` with `full_every` above 1 or a `url`. Servers generate while a file is written.

    The files since the last full copy stay: a server that joins late or missed a version reads the missing ones.
    """

    trainer: Trainer
    pool: ServerPool
    spec: SyncSpec
    _chain: Chain | None = field(default=None, init=False)
    _version: str | None = field(default=None, init=False)  # name of the one that the trainer holds
    _downloads: ServerDownloads | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.spec.source:
            self._downloads = ServerDownloads(self.pool, self.spec.source)

    async def connect(self) -> None:
        """Prepare nothing: the first update writes a full copy."""

    async def send(self, version: int, deadline: Deadline) -> None:
        """Write one version, have the servers load it, and remove the files before a full copy."""
        chain, outdated = await self._write(version, deadline)
        served = chain.with_names() if self._downloads else chain

        async def load() -> None:
            servers = await self._downloads.bring(served, deadline) if self._downloads else None
            async with self.pool.interrupt(version, deadline, servers) as interrupted:
                await asyncio.gather(*(self._load(server, served, version, deadline) for server in interrupted))

        await with_those_left(self.pool, deadline, load)
        for path in outdated:
            await asyncio.to_thread(path.unlink, missing_ok=True)

    async def _load(self, server: Server, chain: Chain, version: int, deadline: Deadline) -> None:
        try:
            await server.load_files(chain, version, deadline.left)
        except ServerError:
            if self._downloads:
                self._downloads.forget(server)  # it starts from a full copy
            raise

    async def _write(self, version: int, deadline: Deadline) -> tuple[Chain, list[Path]]:
        """Write the next version; return the chain that ends with it, and files that no server needs any more."""
        start, old, directory = now(), self._chain, self.spec.directory
        path = directory / f"{version}-{secrets.token_hex(4)}"
        is_full = old is None or len(old.files) >= self.spec.full_every
        try:
            written = await self.trainer.transfer("write", path, self._version, is_full, timeout_s=deadline.left)
        except WorkerError as error:
            raise_if_full(error, version, directory)
            raise
        needed = written.delta or written.full
        note("weights", "file", start, version=version, bytes=needed.size, weights=written.weights)
        self._version = path.name
        if old and written.full is None:
            self._chain = replace(old, files=[*old.files, written.delta])
            return self._chain, []
        self._chain = Chain([written.full], old.state if old and written.delta else None, written.delta)
        return self._chain, [Path(each) for each in old.paths] if old else []
