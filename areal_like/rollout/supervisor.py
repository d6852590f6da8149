"""Restarts servers of the layout that die, hang or are lost with their node; they rejoin at the next weight update.

Meanwhile the pool is smaller. The run ends when fewer than `min_servers` are left.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field

from areal_like.cluster.heartbeat import wait_for_silence
from areal_like.cluster.workers import WorkerGroup
from areal_like.errors import ClusterError, WorkerError
from areal_like.rollout.pool import ServerPool
from areal_like.rollout.server import Server

AGAIN_S = 5.0  # between a failed start, perhaps because memory was not free yet, and the next one
MOST_PATIENCE = 12  # times AGAIN_S at most; the pause doubles after each failure in a row
END_S = 30.0  # time for an actor to end its server; then the actor counts as lost
HOUR_S = 3600.0


@dataclass(eq=False)
class Restarts:
    """The restarts of one server: at most `most` within an hour."""

    most: int
    clock: Callable[[], float] = time.monotonic
    _times: deque[float] = field(default_factory=deque)

    @property
    def wait_s(self) -> float:
        """Seconds until the next restart is allowed; infinite if none is ever allowed."""
        if not self.most:
            return math.inf
        return max(0.0, self._times[0] + HOUR_S - self.clock()) if len(self._times) == self.most else 0.0

    async def permit(self) -> None:
        """Wait until the next restart is allowed, and count it."""
        await asyncio.sleep(self.wait_s)
        if len(self._times) == self.most:
            self._times.popleft()
        self._times.append(self.clock())

    def refund(self) -> None:
        """Uncount the last restart."""
        self._times.pop()

    def __str__(self) -> str:
        """Return a sentence about the next restart, for a message."""
        if self.wait_s == math.inf:
            return "The failed server is not restarted (rollout.max_restarts=0)."
        if self.wait_s:
            minutes = math.ceil(self.wait_s / 60)
            limit = f"rollout.max_restarts allows {self.most} restarts per hour"
            return f"The failed server is restarted in {minutes} min: {limit}."
        return "The failed server is restarted."


@dataclass(eq=False)
class ServerSupervisor:
    """Restarts servers, each at most `max_restarts` times per hour, and ends a run with fewer than `min_servers`.

    A server whose host is silent for `host_timeout_s` seconds is lost with its actor; None: hosts are not asked.
    `servers` are Ray actors (`SGLangServer`) in the order of the pool's servers. `replace` waits for room and yields
    a new actor, a group of one, for a rank whose actor was lost. `say` reports to the user.
    """

    servers: WorkerGroup
    pool: ServerPool
    max_restarts: int
    min_servers: int
    say: Callable[[str], None]
    replace: Callable[[int], AbstractAsyncContextManager[WorkerGroup]]
    host_timeout_s: float | None = None
    _actors: dict[Server, WorkerGroup] = field(default_factory=dict, init=False)

    async def keep(self) -> None:
        """Keep servers running until cancelled; raise WorkerError, a server's failure, if too few servers are left."""
        async with asyncio.TaskGroup() as tasks:
            self.pool.on_hang(lambda server: tasks.create_task(self._end(server)))
            for rank, server in enumerate(self.pool.servers):
                self._actors[server] = self.servers.only(rank)
                tasks.create_task(self._keep(rank, server))

    async def _keep(self, rank: int, server: Server) -> None:
        """Restart a server of the layout whenever it fails, in a new actor if its own was lost."""
        restarts = Restarts(self.max_restarts)
        async with AsyncExitStack() as held:
            while True:
                actor = self._actors[server]
                failure = await self.wait_for_failure(server, actor)
                self._survive(failure, restarts, server)
                if _has_lost_its_actor(failure):
                    actor.kill()
                    server = await self._restart(rank, None, restarts, held)
                else:
                    server = await self._restart(rank, actor, restarts, held)

    async def wait_for_failure(self, server: Server, actor: WorkerGroup) -> WorkerError:
        """Wait until a server, its actor or its host fails, or the pool has removed the server; return the failure."""
        watching = asyncio.ensure_future(actor.call_one(0, "watch", phase="serving", timeout=math.inf))
        silence = asyncio.ensure_future(self._wait_for_silence(server))
        try:
            await asyncio.wait((watching, silence, server.left), return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                await watching
            member = actor.members[0]
            cause = server.left.result() if server.left.done() else self._describe_silence(member.host)
            return WorkerError(actor.role, member.rank, "serving", cause, member.log_file)
        except WorkerError as failure:
            return failure
        finally:
            watching.cancel()
            silence.cancel()
            del self._actors[server]

    async def _wait_for_silence(self, server: Server) -> None:
        if self.host_timeout_s is None:
            await asyncio.Event().wait()
        else:
            await wait_for_silence(server.url, self.host_timeout_s)

    def _describe_silence(self, host: str) -> str:
        return f"host {host} did not answer for {self.host_timeout_s:g} s (cluster.host_timeout_s)"

    def _survive(self, failure: WorkerError | ClusterError, restarts: Restarts, lost: Server | None = None) -> None:
        """Remove a lost server from the pool; raise the failure if too few servers are left.

        Before the first version every server that has not failed counts, afterwards every server with the weights.
        """
        there = self.pool.servers if self.pool.version < 0 else self.pool.serving
        left = len([server for server in there if server is not lost])
        if left < self.min_servers:
            raise failure
        others = "1 server continues" if left == 1 else f"{left} servers continue"
        self.say(f"{first_line(failure)}. {others}. {restarts}")
        if lost:
            self.pool.leave(lost, first_line(failure))

    async def _restart(self, rank: int, actor: WorkerGroup | None, restarts: Restarts, held: AsyncExitStack) -> Server:
        """Start a server in its actor or, without one, in a new actor that `held` releases; repeat as often as allowed.

        An actor that does not start, or is lost meanwhile, does not count as a failure of the server.
        """
        attempt = 0
        while True:
            await restarts.permit()
            try:
                if actor is None:
                    await held.aclose()
                    actor = await held.enter_async_context(self.replace(rank))
                url = await actor.call_one(0, "start", phase="restart")
            except (ClusterError, WorkerError) as failure:
                if isinstance(failure, ClusterError) or _has_lost_its_actor(failure):
                    restarts.refund()
                self._survive(failure, restarts)
                if actor:
                    actor.kill()
                    actor = None
                await asyncio.sleep(AGAIN_S * min(2**attempt, MOST_PATIENCE))
                attempt = min(attempt + 1, MOST_PATIENCE)
            else:
                news = f"Server {rank} restarted as {{}}. It rejoins at the next weight update."
                return self.admit(url, actor, rank, news)

    def admit(self, url: str, actor: WorkerGroup, rank: int, news: str) -> Server:
        """Add a started server to the pool, and report the news with its name."""
        server = self.pool.join(url, rank)
        self._actors[server] = actor
        self.say(news.format(server.name))
        return server

    async def _end(self, server: Server) -> None:
        """End a hung server; its watcher restarts it, but reports only an exit code."""
        if server not in self.pool.servers:  # it was already replaced
            return
        why = "made no progress on requests (rollout.request_timeout_s) or on an update (weight_update.timeout_s)"
        self.say(f"{server.name} {why}. It is killed.")
        try:
            await self._actors[server].call_one(0, "end", phase="serving", timeout=END_S)
        except WorkerError as error:
            self.pool.leave(server, f"{server.name} hangs and could not be killed: {first_line(error)}")


def _has_lost_its_actor(failure: WorkerError) -> bool:
    return not failure.remote_traceback


def first_line(failure: Exception) -> str:
    """Return the first line of a failure's cause."""
    cause = failure.cause if isinstance(failure, WorkerError) else str(failure)
    return cause.splitlines()[0]
