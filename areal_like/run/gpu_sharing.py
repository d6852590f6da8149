"""GPUs that trainer and servers share: both stay on them, or they take turns (`rollout.sharing`)."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from areal_like.config.schema import RunConfig
from areal_like.rollout.pool import ServerPool
from areal_like.rollout.sglang.http import Deadline
from areal_like.trainer.engine import Part
from areal_like.trainer.remote import Trainer
from areal_like.weights.sync import WeightSync, limited

BESIDE_WEIGHTS: tuple[Part, ...] = ("grads", "optimizer")


class Sharing(Protocol):
    """Whose turn it is on the GPUs, as the loop says it."""

    async def to_servers(self) -> None:
        """Generation may go on."""

    async def to_trainer(self, evaluating: asyncio.Task[None] | None) -> None:
        """The trainer is about to be called; an evaluation that runs has its answers first."""


class Resident:
    """Both are always there: `rollout.sharing: resident`, and what do not share GPUs."""

    async def to_servers(self) -> None: ...

    async def to_trainer(self, evaluating: asyncio.Task[None] | None) -> None: ...


RESIDENT = Resident()


@dataclass(eq=False)
class Alternate:
    """`rollout.sharing: alternate`: the servers generate while the trainers wait in host memory, and the other way.

    The servers' turn ends as soon as a batch is finished: what else runs then pauses between two tokens and goes on in
    their next turn, under the new weights. It is a way for weights as well, `sync` with what makes room for it: in the
    trainer's turn the servers have no weights, and get memory for them when the new ones come.
    """

    sync: WeightSync
    trainers: Sequence[Trainer]
    pool: ServerPool
    timeout_s: float
    phase: Callable[[str], AbstractContextManager[None]]

    async def to_trainer(self, evaluating: asyncio.Task[None] | None) -> None:
        """The servers pause and give back their memory, then the trainers come."""
        if evaluating:
            with self.phase("evaluation"):
                await evaluating
        with self.phase("turn of the trainer"):
            async with limited("the servers giving back their memory", self.timeout_s):
                await self.pool.hold(Deadline(self.timeout_s))
            await asyncio.gather(*(trainer.onload() for trainer in self.trainers))

    async def to_servers(self) -> None:
        """The trainers leave, then the servers take their memory and go on."""
        with self.phase("turn of the servers"):
            await asyncio.gather(*(trainer.offload() for trainer in self.trainers))
            async with limited("the servers taking back their memory", self.timeout_s):
                await self.pool.release_hold(Deadline(self.timeout_s))

    async def connect(self) -> None:
        """As `sync` does."""
        await self.sync.connect()

    async def send(self, version: int, deadline: Deadline) -> None:
        """Make room for the servers' weights, and send them."""
        await asyncio.gather(*(trainer.offload(BESIDE_WEIGHTS) for trainer in self.trainers))
        await self.pool.take_weights_back(deadline)
        await self.sync.send(version, deadline)


def shared(
    config: RunConfig,
    sync: WeightSync,
    trainers: Sequence[Trainer],
    pool: ServerPool,
    phase: Callable[[str], AbstractContextManager[None]],
) -> tuple[Sharing, WeightSync]:
    """Whose turn it is under `rollout.sharing`, and the way for weights that heeds it; the first turn is the trainer's
    once it is asked for.
    """
    if not config.rollout.alternates:
        return RESIDENT, sync
    alternate = Alternate(sync, trainers, pool, config.weight_update.timeout_s, phase)
    return alternate, alternate
