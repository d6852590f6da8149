"""Elastic servers: servers beyond the layout, started when the cluster has room for them (`rollout.max_servers`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field

from areal_like.cluster.workers import WorkerGroup
from areal_like.errors import ClusterError, ServerError, WorkerError
from areal_like.rollout.supervisor import AGAIN_S, Restarts, ServerSupervisor, first_line

type Room = Callable[[], AbstractAsyncContextManager[WorkerGroup]]


@dataclass(eq=False)
class ElasticServers:
    """Starts one server in each of `rooms`, by number, and restarts it in another room when it fails.

    A room yields a server's actor once the cluster has the GPUs. The failure of an elastic server does not end the run,
    except within an update over nccl.
    """

    supervisor: ServerSupervisor
    rooms: Mapping[int, Room]
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)  # for room, one at a time

    async def keep(self) -> None:
        """Keep every server running until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for number, room in self.rooms.items():
                tasks.create_task(self._keep(number, room))

    async def _keep(self, number: int, room: Room) -> None:
        restarts = Restarts(self.supervisor.max_restarts)
        while True:
            try:
                async with AsyncExitStack() as held:
                    async with self._asking:
                        actor = await held.enter_async_context(room())
                    await self._serve(number, actor)
            except (ClusterError, ServerError, WorkerError) as failure:
                self.supervisor.say(f"Server {number} failed: {first_line(failure)}. {restarts}")
                await asyncio.sleep(AGAIN_S)
                await restarts.permit()

    async def _serve(self, number: int, actor: WorkerGroup) -> None:
        """Start a server and raise its failure; the owner of the room ends its actor."""
        url = await actor.call_one(0, "start", phase="start-up")
        started = f"Server {number} started on {actor.members[0].host} as {{}}. It joins at the next weight update."
        server = self.supervisor.admit(url, actor, None, started)
        failure = await self.supervisor.wait_for_failure(server, actor)
        self.supervisor.pool.leave(server, first_line(failure))
        raise failure
