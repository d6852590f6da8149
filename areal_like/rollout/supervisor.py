"""Watches the servers of a run: one that dies or hangs is started again, and joins with the next weights.

So does a further server, when the cluster has room for it; what befalls that one does not end the run, except within
an update over nccl.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field

from areal_like.cluster.workers import WorkerGroup
from areal_like.errors import ClusterError, ServerError, WorkerError
from areal_like.rollout.pool import ServerPool
from areal_like.rollout.sglang.http import Server

AGAIN_S = 5.0  # from a start that failed, perhaps for memory that was not free yet, to the next

type Room = Callable[[], AbstractAsyncContextManager[WorkerGroup]]


@dataclass(eq=False)
class ServerSupervisor:
    """What restarts servers: at most `max_restarts` in the run, and only while `min_servers` others serve.

    `servers` are Ray actors (`SGLangServer`) in the order of the pool's servers; `say` tells the user. Of further ones
    each of `rooms` waits for room, and then holds the actor, a group of one; each may be started again `max_restarts`
    times.
    """

    servers: WorkerGroup
    pool: ServerPool
    max_restarts: int
    min_servers: int
    say: Callable[[str], None]
    rooms: Sequence[Room] = ()
    restarts: int = field(default=0, init=False)
    _actors: dict[Server, tuple[WorkerGroup, int]] = field(default_factory=dict, init=False)
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)  # for room, one at a time

    async def keep(self) -> None:
        """Return never; raises WorkerError, the death of a server, where the run cannot go on without it."""
        async with asyncio.TaskGroup() as tasks:
            self.pool.on_hang(lambda server: tasks.create_task(self._end(server)))
            planned = self.pool.servers
            for rank, server in enumerate(planned):
                self._actors[server] = self.servers, rank
                tasks.create_task(self._keep(rank, server))
            for number, room in enumerate(self.rooms, len(planned)):
                tasks.create_task(self._add(room, number))

    async def _keep(self, rank: int, server: Server) -> None:
        while True:
            try:
                await self._watch(server)
            except WorkerError as death:
                self._may_go_on(death, server)
                self.pool.leave(server, death.cause.splitlines()[0])
            server = await self._start(rank)

    async def _watch(self, server: Server) -> None:
        actors, rank = self._actors[server]
        await actors.call_one(rank, "watch", phase="serving", timeout=math.inf)

    async def _start(self, rank: int) -> Server:
        while True:
            self.restarts += 1
            try:
                url = await self.servers.call_one(rank, "start", phase="restart")
            except WorkerError as failure:
                self._may_go_on(failure)
                await asyncio.sleep(AGAIN_S)
            else:
                return self._join(url, self.servers, rank, f"server {rank} runs again as {{}}")

    def _join(self, url: str, actors: WorkerGroup, rank: int, news: str) -> Server:
        server = self.pool.join(url, rank if actors is self.servers else None)
        self._actors[server] = actors, rank
        self.say(f"{news.format(server.name)}, and takes part from the next weights on")
        return server

    def _may_go_on(self, failure: WorkerError, dead: Server | None = None) -> None:
        """Raise the failure where the run ends with it; a worker that died with its server is not started again."""
        left = len([server for server in self.pool.serving if server is not dead])
        if left < self.min_servers or self.restarts >= self.max_restarts or not failure.remote_traceback:
            raise failure
        self.say(f"{failure.cause.splitlines()[0]}; {left} others go on, and it is started again")

    async def _add(self, room: Room, number: int) -> None:
        """Have a further server, in other room when it has failed or its node is lost."""
        for restarts in range(self.max_restarts + 1):
            try:
                async with AsyncExitStack() as held:
                    async with self._asking:
                        actor = await held.enter_async_context(room())
                    await self._serve(actor, number)
            except (ClusterError, ServerError, WorkerError) as failure:
                again = "it is started again once the cluster has room for it"
                over = f"it was started again {restarts} times (rollout.max_restarts), and is not any more"
                cause = failure.cause if isinstance(failure, WorkerError) else str(failure)
                what = again if restarts < self.max_restarts else over
                self.say(f"server {number}: {cause.splitlines()[0]}; the others go on, and {what}")
                await asyncio.sleep(AGAIN_S)

    async def _serve(self, actor: WorkerGroup, number: int) -> None:
        """Have it take part until it fails, or is taken out; who gave the room ends what is there."""
        url = await actor.call_one(0, "start", phase="start-up")
        server = self._join(url, actor, 0, f"server {number} was added on {actor.members[0].host} as {{}}")
        watching = asyncio.ensure_future(self._watch(server))
        try:
            await asyncio.wait((watching, server.left), return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                await watching
            raise ServerError(server.left.result(), "left")
        except WorkerError as death:
            self.pool.leave(server, death.cause.splitlines()[0])
            raise
        finally:
            watching.cancel()

    async def _end(self, server: Server) -> None:
        """End a server that hangs; its watcher does the rest, but knows an exit code alone."""
        if server not in self.pool.servers:  # another is in its place
            return
        why = "did nothing although it had requests (rollout.request_timeout_s) or an update (weight_update.timeout_s)"
        self.say(f"{server.name} {why}, and is ended")
        if server.rank is None:
            self.pool.leave(server, "hangs")
            return
        actors, rank = self._actors[server]
        try:
            await actors.call_one(rank, "end", phase="serving")
        except WorkerError as error:
            raise ServerError(f"{server.name} hangs and cannot be ended: {error}") from error
