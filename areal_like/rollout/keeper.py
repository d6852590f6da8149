"""Watches the servers of a run: one that dies or hangs is started again, and joins with the next weights."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from areal_like.cluster.workers import WorkerGroup
from areal_like.errors import ServerError, WorkerError
from areal_like.rollout.pool import ServerPool
from areal_like.rollout.sglang.http import Server

AGAIN_S = 5.0  # from a start that failed, perhaps for memory that was not free yet, to the next


@dataclass(eq=False)
class Keeper:
    """What restarts servers: at most `max_restarts` in the run, and only while `min_servers` others serve.

    `servers` are Ray actors (`SGLangServer`) in the order of the pool's servers; `say` tells the user.
    """

    servers: WorkerGroup
    pool: ServerPool
    max_restarts: int
    min_servers: int
    say: Callable[[str], None]
    restarts: int = field(default=0, init=False)

    async def keep(self) -> None:
        """Return never; raises WorkerError, the death of a server, where the run cannot go on without it."""
        async with asyncio.TaskGroup() as tasks:
            self.pool.on_hang(lambda server: tasks.create_task(self._end(server)))
            self._ranks = {server: rank for rank, server in enumerate(self.pool.servers)}
            for server, rank in self._ranks.copy().items():
                tasks.create_task(self._keep(rank, server))

    async def _keep(self, rank: int, server: Server) -> None:
        while True:
            try:
                await self.servers.call_one(rank, "watch", phase="serving", timeout=math.inf)
            except WorkerError as death:
                self._may_go_on(death, server)
                self.pool.leave(server, death.cause.splitlines()[0])
            server = await self._start(rank)

    async def _start(self, rank: int) -> Server:
        while True:
            self.restarts += 1
            try:
                url = await self.servers.call_one(rank, "start", phase="restart")
            except WorkerError as failure:
                self._may_go_on(failure)
                await asyncio.sleep(AGAIN_S)
            else:
                server = self.pool.join(url)
                self._ranks[server] = rank
                self.say(f"server {rank} runs again as {server.name}, and takes part from the next weights on")
                return server

    def _may_go_on(self, failure: WorkerError, dead: Server | None = None) -> None:
        """Raise the failure where the run ends with it; a worker that died with its server is not started again."""
        left = len([server for server in self.pool.serving if server is not dead])
        if left < self.min_servers or self.restarts >= self.max_restarts or not failure.remote_traceback:
            raise failure
        self.say(f"{failure.cause.splitlines()[0]}; {left} others go on, and it is started again")

    async def _end(self, server: Server) -> None:
        """End a server that hangs; its watcher does the rest, but knows an exit code alone."""
        why = "did nothing although it had requests (rollout.request_timeout_s) or an update (weight_update.timeout_s)"
        self.say(f"{server.name} {why}, and is ended")
        try:
            await self.servers.call_one(self._ranks[server], "end", phase="serving")
        except WorkerError as error:
            raise ServerError(f"{server.name} hangs and cannot be ended: {error}") from error
