"""Adapters alone over a directory that trainer and servers share; the servers' model never changes."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from areal_like.backends.transports.disk.controller import send_once
from areal_like.core.rollout.http import Deadline
from areal_like.core.rollout.pool import ServerPool
from areal_like.core.rollout.server import Server
from areal_like.core.trainer.remote import Trainer
from areal_like.core.transfer import ONLY_ADAPTER
from areal_like.core.weights import SyncSpec


@dataclass(eq=False)
class AdapterSync:
    """`weight_update.adapters`. Servers generate while adapters are written to the spec's directory.

    A server receives the adapters that were trained since its last update, and all of them if it is new or if a
    version is sent again, as the drift alarm does to compare them.
    """

    trainer: Trainer
    pool: ServerPool
    spec: SyncSpec
    _sent: int | None = field(default=None, init=False)  # version
    _held: dict[Server, Mapping[str, int]] = field(default_factory=dict, init=False)  # adapters, and their steps

    @property
    def _trainers(self) -> Mapping[str, Trainer]:
        return self.spec.adapters or {ONLY_ADAPTER: self.trainer}

    async def connect(self) -> None:
        """Prepare nothing: earlier updates only save servers from receiving adapters again."""

    async def send(self, version: int, deadline: Deadline) -> None:
        """Write adapters, have every server replace its own, and remove the files however that ends."""
        trainers, writing, written = self._trainers, asyncio.Lock(), set[str]()
        steps = {name: trainer.trained for name, trainer in trainers.items()}
        directory, again = self.spec.directory / f"adapters-{version}", version == self._sent
        self._sent = version

        def missing(server: Server) -> list[str]:
            held = {} if again else self._held.get(server, {})
            return [name for name in trainers if held.get(name) != steps[name]]

        async def write(names: Iterable[str], timeout_s: float) -> None:
            async with writing:
                for name in sorted({*names} - written):
                    path, phase = directory / name, "weight update (send)"
                    await trainers[name].save_adapters(path, phase=phase, timeout_s=timeout_s)
                    written.add(name)

        async def save(path: Path, *, phase: str, timeout_s: float) -> None:
            await write((name for server in self.pool.servers for name in missing(server)), timeout_s)

        async def load(server: Server) -> None:
            names = missing(server)
            await write(names, deadline.left)  # for a server that joined meanwhile
            await server.load_adapters({name: str(directory / name) for name in names}, version, deadline.left)
            self._held[server] = steps

        await send_once(self.pool, save, directory, load, version, deadline)
