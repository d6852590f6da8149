"""Tracks which server has downloaded which weight files (`weight_update.url`)."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from areal_like.core.errors import ServerError
from areal_like.core.rollout.http import Deadline
from areal_like.core.rollout.pool import ServerPool
from areal_like.core.rollout.server import Server
from areal_like.core.transfer import Chain, FileSource

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
