"""Weights by broadcast: buckets of tensors through one process group of trainer rank 0 and every server rank."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from areal_like.core.errors import ServerError, WorkerError
from areal_like.core.rollout.http import AFTERMATH_S, Deadline
from areal_like.core.rollout.pool import ServerPool
from areal_like.core.rollout.server import Server, WeightGroup
from areal_like.core.trainer.remote import Trainer
from areal_like.core.weights import SyncSpec, TensorSpec, layout, time_limit, with_those_left

GROUP = "areal_like_weights"


@dataclass(eq=False)
class CollectiveSync:
    """`weight_update.mode: collective`, over nccl between GPUs and over gloo otherwise.

    The trainer prepares buckets (gathers them from its ranks) and then sends them, as two calls, so that a trainer that
    does not get its weights together is never mistaken for a server that does not receive. The first buckets are
    prepared while the servers generate, each further one while they load the one before. Servers are asked once, for
    all of them: they answer late while they have many responses to tell, and requests would wait for each answer.
    """

    trainer: Trainer
    pool: ServerPool
    spec: SyncSpec
    _joined: list[Server] = field(default_factory=list, init=False)
    _group: str = field(default="", init=False)  # the present one's name: each has another one
    _buckets: Sequence[Sequence[TensorSpec]] = field(default=(), init=False)

    async def connect(self) -> None:
        """Form the process group: rank 0 is the trainer's, then the servers' ranks in order."""
        async with time_limit(
            f"connecting trainer and servers over {type(self).__name__}", self.spec.timeout_s
        ) as limit:
            await with_those_left(self.pool, limit, lambda: self._connect(limit))

    async def _connect(self, limit: Deadline) -> None:
        await self._disconnect(limit)
        servers = self.pool.servers
        self._group = f"{GROUP}-{secrets.token_hex(4)}"
        world_size = 1 + self.spec.ranks_per_server * len(servers)
        address, port = await self.trainer.transfer(
            "open", world_size, self._group, limit.seconds, timeout_s=limit.left
        )
        group = WeightGroup(self._group, address, port, world_size, self.spec.backend)
        await _together(
            self.trainer.transfer("join", self.spec.backend, timeout_s=limit.left + 2 * AFTERMATH_S),
            *(
                server.join_group(group, 1 + place * self.spec.ranks_per_server, limit.left)
                for place, server in enumerate(servers)
            ),
        )
        self._buckets = await self.trainer.transfer("layout", self.spec.bucket_mb, timeout_s=limit.left)
        self._joined = servers

    async def send(self, version: int, deadline: Deadline) -> None:
        """Broadcast bucket after bucket; one request announces all of them to a server."""
        if self.spec.backend == "gloo":
            await with_those_left(self.pool, deadline, lambda: self._send(version, deadline))
        else:  # a process that waits in a call of nccl for a dead server cannot answer
            await with_those_left(self.pool, deadline, lambda: self._connect_anew(deadline))
            await self._send(version, deadline)

    async def _connect_anew(self, limit: Deadline) -> None:
        if self.pool.servers != self._joined:
            await self._connect(limit)

    async def _send(self, version: int, deadline: Deadline) -> None:
        await self._connect_anew(deadline)
        deadline.renew()
        ahead = self.spec.ahead(self._buckets)
        await self.trainer.transfer("prepare", 0, ahead, timeout_s=deadline.left)
        async with self.pool.interrupt(version, deadline, self._joined):
            buckets = [layout(bucket) for bucket in self._buckets]
            async with self._given_up_on_failure(deadline):
                await _together(
                    self._send_buckets(ahead, deadline),
                    *(server.receive(self._group, buckets, version, deadline.left) for server in self._joined),
                )

    @asynccontextmanager
    async def _given_up_on_failure(self, deadline: Deadline) -> AsyncIterator[None]:
        """End the broadcast on all servers if the body fails: healthy servers may wait for a lost one.

        With gloo they answer then, and a server that does not is the one that hangs.
        """
        try:
            yield
        except (ServerError, WorkerError) as error:

            async def give_up(server: Server) -> None:
                with suppress(ServerError):
                    await server.give_up_group(self._group, AFTERMATH_S)

            present = [server for server in self._joined if server in self.pool.servers]
            await asyncio.gather(*map(give_up, present))
            if self.spec.backend == "gloo" and isinstance(error, ServerError) and error.fault == "late":
                deadline.renew()
                await self.pool.end_unresponsive(present)
            raise

    async def _send_buckets(self, prepared: int, deadline: Deadline) -> None:
        for number in range(prepared, len(self._buckets) + 1):
            # a server that does not receive is named first, by its own limit
            await self.trainer.transfer("send", timeout_s=deadline.left + 2 * AFTERMATH_S)
            if number < len(self._buckets):
                await self.trainer.transfer("prepare", number, timeout_s=deadline.left)

    async def _disconnect(self, limit: Deadline) -> None:
        """End the process group, which has a server too many or too few, or was not formed by all.

        Servers may also be in a group of the trainer's before it was restarted.
        """
        formed, self._joined, self._group = self._group, [], ""
        if formed:
            await self.trainer.transfer("close", timeout_s=limit.left)

        async def destroy(server: Server, group: str) -> None:
            with suppress(ServerError):  # not every server has the group; one that cannot leave it fails when it joins
                await server.leave_group(group, limit.left)

        await asyncio.gather(*(destroy(server, server.group) for server in self.pool.servers if server.group))
        limit.renew()


async def _together(*ends: Awaitable[None]) -> None:
    """Wait for all ends of a collective, the trainer's first.

    When one end fails the others do too, and not always later. The death of a trainer rank is raised first, then the
    error of a server; the death of a server is raised by its watcher, which cancels this meanwhile.
    """
    tasks = [asyncio.ensure_future(end) for end in ends]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if _failures(tasks):
            await asyncio.wait(tasks, timeout=AFTERMATH_S)
        failures = _failures(tasks)
        refusals = [error for error in failures if isinstance(error, ServerError)]
        servers = [name for error in refusals for name in error.servers]
        for refusal in refusals:  # which of them made the others fail is unknown
            refusal.servers = servers
        deaths = [error for error in failures if isinstance(error, WorkerError) and not error.remote_traceback]
        for error in deaths or failures[::-1]:
            raise error
    finally:
        for task in tasks:
            task.cancel()


def _failures(tasks: Sequence[asyncio.Future[None]]) -> list[BaseException]:
    errors = [task.exception() for task in tasks if task.done()]
    return [error for error in errors if error is not None]
