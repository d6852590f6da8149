"""Weights as files for the servers: a full copy every few versions, and deltas to the version before."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from areal_like.backends.transports.disk.controller import raise_if_full
from areal_like.core.errors import ServerError, WorkerError
from areal_like.core.events import note, now
from areal_like.core.rollout.http import Deadline
from areal_like.core.rollout.pool import ServerPool
from areal_like.core.rollout.server import Server
from areal_like.core.trainer.remote import Trainer
from areal_like.core.transfer import Chain, FileSource
from areal_like.core.weights import SyncSpec, with_those_left

SHARE = 2 / 3  # of the time of an update, for downloads; the rest is for loading
LATE_S = 24 * 3600.0  # that a server which has joined may download; a new full copy ends that earlier


@dataclass(eq=False)
class ServerDownloads:
    """Has servers download a chain of files before they pause.

    Servers that have joined since the last update download beside it, and join at the first update that finds them
    done. A server that cannot download leaves the pool, if others can: the supervisor restarts it.
    """

    pool: ServerPool
    source: FileSource
    _states: dict[Server, str] = field(default_factory=dict, init=False)  # downloaded version of each server
    _late: dict[Server, tuple[Chain, asyncio.Task[None]]] = field(default_factory=dict, init=False)

    async def bring(self, chain: Chain, deadline: Deadline) -> Sequence[Server]:
        """Return the servers that have all files; raise ServerError if none has them."""
        self._forget_lost()
        serving = self.pool.serving or self.pool.servers
        limit_s = SHARE * deadline.left
        joining = [server for server in self.pool.servers if server not in serving]
        ready = [server for server in joining if self._has_caught_up(server, chain)]
        asked = [*serving, *ready]
        ended = await asyncio.gather(*(self._fetch(server, chain, limit_s) for server in asked), return_exceptions=True)
        failed = {server: error for server, error in zip(asked, ended, strict=True) if error is not None}
        done = [server for server in asked if server not in failed and server in self.pool.servers]
        for server, error in failed.items():
            if not isinstance(error, ServerError) or not done:
                raise error
            self.pool.leave(server, f"did not download the weights: {error}")
        if failed:
            deadline.renew()
        return [*done, *(server for server in joining if server not in ready and self._has_all(server, chain))]

    def forget(self, server: Server) -> None:
        """Begin with a full copy on this server at the next update."""
        self._states.pop(server, None)

    def _has_caught_up(self, server: Server, chain: Chain) -> bool:
        """Return whether a server that has joined lacks only deltas; start its download if it does not run."""
        known, task = self._late.get(server, (None, None))
        if task and known and (not task.done() or task.exception() is None) and known.full == chain.full:
            return task.done()
        if task:
            task.cancel()
        task = asyncio.create_task(self._fetch(server, chain, LATE_S))
        task.add_done_callback(_note_failure)
        self._late[server] = chain, task
        return False

    def _has_all(self, server: Server, chain: Chain) -> bool:
        return self._states.get(server) == chain.state and server in self.pool.servers

    async def _fetch(self, server: Server, chain: Chain, limit_s: float) -> None:
        state = self._states.get(server)
        if state != chain.state:
            await server.download(self.source, chain, state, limit_s)
            self._states[server] = chain.state

    def _forget_lost(self) -> None:
        """Forget servers that have left the pool, and downloads of servers that serve by now."""
        here, serving = self.pool.servers, self.pool.serving
        self._states = {server: state for server, state in self._states.items() if server in here}
        for server, (_, task) in list(self._late.items()):
            if server not in here or server in serving:
                task.cancel()
                del self._late[server]


def _note_failure(task: asyncio.Task[None]) -> None:
    """Retrieve the failure of a late server's download, which begins again at the next update."""
    if not task.cancelled():
        task.exception()


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
