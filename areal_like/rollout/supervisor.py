"""Watches the servers of a run: one that dies, hangs or is lost with its node is restarted, and rejoins with the next
weights.

Meanwhile the pool is smaller; the run ends when fewer than `min_servers` are left. A further server starts when the
cluster has room for it; its failure does not end the run, except within an update over nccl.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field

from areal_like.cluster.workers import WorkerGroup
from areal_like.errors import ClusterError, ServerError, WorkerError
from areal_like.rollout.pool import ServerPool
from areal_like.rollout.sglang.server import Server

AGAIN_S = 5.0  # from a start that failed, perhaps for memory that was not free yet, to the next
MOST_PATIENCE = 12  # times that at most, twice as long after each failure in a row
END_S = 30.0  # that an actor has for ending its server, before it is taken for lost
HOUR_S = 3600.0

type Room = Callable[[], AbstractAsyncContextManager[WorkerGroup]]


@dataclass(eq=False)
class Restarts:
    """The restarts of one server: at most `most` within an hour."""

    most: int
    clock: Callable[[], float] = time.monotonic
    _times: deque[float] = field(default_factory=deque)

    @property
    def wait_s(self) -> float:
        """Seconds until the next one is allowed; infinite where none ever is."""
        if not self.most:
            return math.inf
        return max(0.0, self._times[0] + HOUR_S - self.clock()) if len(self._times) == self.most else 0.0

    async def permit(self) -> None:
        """Wait until the next one is allowed, and count it."""
        await asyncio.sleep(self.wait_s)
        if len(self._times) == self.most:
            self._times.popleft()
        self._times.append(self.clock())

    def refund(self) -> None:
        """Do not count the last one."""
        self._times.pop()

    def __str__(self) -> str:
        """When the next one is, for a message."""
        if self.wait_s == math.inf:
            return "it is not restarted (rollout.max_restarts=0)"
        if self.wait_s:
            minutes = math.ceil(self.wait_s / 60)
            return f"it is restarted in {minutes} min, as rollout.max_restarts allows {self.most} restarts an hour"
        return "it is restarted"


@dataclass(eq=False)
class ServerSupervisor:
    """Restarts servers, each at most `max_restarts` times an hour, and ends a run with fewer than `min_servers`.

    `servers` are Ray actors (`SGLangServer`) in the order of the pool's servers. `replace` gives another actor, a group
    of one, in place of that of a rank which was lost; each of `rooms` one for a further server. Both wait for room.
    `say` reports to the user.
    """

    servers: WorkerGroup
    pool: ServerPool
    max_restarts: int
    min_servers: int
    say: Callable[[str], None]
    replace: Callable[[int], AbstractAsyncContextManager[WorkerGroup]]
    rooms: Sequence[Room] = ()
    _actors: dict[Server, WorkerGroup] = field(default_factory=dict, init=False)
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)  # for room, one at a time

    async def keep(self) -> None:
        """Return never; raises WorkerError, the death of a server, where too few are left."""
        async with asyncio.TaskGroup() as tasks:
            self.pool.on_hang(lambda server: tasks.create_task(self._end(server)))
            planned = self.pool.servers
            for rank, server in enumerate(planned):
                self._actors[server] = self.servers.only(rank)
                tasks.create_task(self._keep(rank, server))
            for number, room in enumerate(self.rooms, len(planned)):
                tasks.create_task(self._add(room, number))

    async def _keep(self, rank: int, server: Server) -> None:
        """Restart a server of the layout whenever it fails, in another actor where its own was lost."""
        restarts = Restarts(self.max_restarts)
        async with AsyncExitStack() as held:
            while True:
                actor = self._actors[server]
                failure = await self._failure(server, actor)
                self._survive(failure, restarts, server)
                if _has_lost_its_actor(failure):
                    actor.kill()
                    server = await self._restart(rank, None, restarts, held)
                else:
                    server = await self._restart(rank, actor, restarts, held)

    async def _failure(self, server: Server, actor: WorkerGroup) -> WorkerError:
        """Wait until a server or its actor ends, or the pool has lost it."""
        watching = asyncio.ensure_future(actor.call_one(0, "watch", phase="serving", timeout=math.inf))
        try:
            await asyncio.wait((watching, server.left), return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                await watching
            member = actor.members[0]
            return WorkerError(actor.role, member.rank, "serving", server.left.result(), member.log_file)
        except WorkerError as failure:
            return failure
        finally:
            watching.cancel()
            del self._actors[server]

    def _survive(self, failure: WorkerError | ClusterError, restarts: Restarts, lost: Server | None = None) -> None:
        """Remove a server that was lost from the pool; raise the failure where too few are left.

        Before the first version all servers that have not failed count, then those that hold the weights.
        """
        there = self.pool.servers if self.pool.version < 0 else self.pool.serving
        left = len([server for server in there if server is not lost])
        if left < self.min_servers:
            raise failure
        self.say(f"{_first_line(failure)}; {left} others continue, and {restarts}")
        if lost:
            self.pool.leave(lost, _first_line(failure))

    async def _restart(self, rank: int, actor: WorkerGroup | None, restarts: Restarts, held: AsyncExitStack) -> Server:
        """Start a server in its actor, or in another one, which `held` gives back; as often as is allowed.

        An actor that does not start, or is lost meanwhile, is not a failure of the server, and does not count.
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
                return self._join(url, actor, rank, f"server {rank} restarted as {{}}")

    def _join(self, url: str, actor: WorkerGroup, rank: int | None, news: str) -> Server:
        server = self.pool.join(url, rank)
        self._actors[server] = actor
        self.say(f"{news.format(server.name)}; it joins at the next weight update")
        return server

    async def _add(self, room: Room, number: int) -> None:
        """Have a further server, in other room when it has failed or its node is lost."""
        restarts = Restarts(self.max_restarts)
        while True:
            try:
                async with AsyncExitStack() as held:
                    async with self._asking:
                        actor = await held.enter_async_context(room())
                    await self._serve(actor, number)
            except (ClusterError, ServerError, WorkerError) as failure:
                self.say(f"server {number}: {_first_line(failure)}; the others continue, and {restarts}")
                await asyncio.sleep(AGAIN_S)
                await restarts.permit()

    async def _serve(self, actor: WorkerGroup, number: int) -> None:
        """Have a further server take part until it fails, or is taken out; who gave the room ends what is there."""
        url = await actor.call_one(0, "start", phase="start-up")
        server = self._join(url, actor, None, f"server {number} was added on {actor.members[0].host} as {{}}")
        failure = await self._failure(server, actor)
        self.pool.leave(server, _first_line(failure))
        raise failure

    async def _end(self, server: Server) -> None:
        """End a server that hangs; its watcher does the rest, but knows an exit code alone."""
        if server not in self.pool.servers:  # another is in its place
            return
        why = "did nothing although it had requests (rollout.request_timeout_s) or an update (weight_update.timeout_s)"
        self.say(f"{server.name} {why}, and is ended")
        if server.rank is None:
            self.pool.leave(server, "hangs")
            return
        try:
            await self._actors[server].call_one(0, "end", phase="serving", timeout=END_S)
        except WorkerError as error:
            self.pool.leave(server, f"{server.name} hangs and cannot be ended: {_first_line(error)}")


def _has_lost_its_actor(failure: WorkerError) -> bool:
    return not failure.remote_traceback


def _first_line(failure: Exception) -> str:
    cause = failure.cause if isinstance(failure, WorkerError) else str(failure)
    return cause.splitlines()[0]
