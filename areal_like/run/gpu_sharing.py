"""GPUs that trainer and servers share: colocated or time-shared (`rollout.sharing`)."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from areal_like.backends.ray.run import RunCluster
from areal_like.core.config.schema import RunConfig, TrainerRole
from areal_like.core.loop.loop import RESIDENT, Sharing
from areal_like.core.rollout.http import Deadline
from areal_like.core.rollout.pool import ServerPool
from areal_like.core.trainer.engine import Part
from areal_like.core.trainer.remote import Trainer
from areal_like.core.weights import WeightSync, publish, time_limit
from areal_like.job import Job
from areal_like.run.ready import Serving
from areal_like.run.transport import weight_sync

BESIDE_WEIGHTS: tuple[Part, ...] = ("grads", "optimizer")


@dataclass(eq=False)
class Alternate:
    """Time-shared GPUs (`rollout.sharing: alternate`): servers generate while the trainers wait in host memory,
    and vice versa.

    The servers' time slice ends when a batch is complete. Running requests pause between two tokens and continue in the
    next time slice with the new weights. It is a weight transport too: `sync`, preceded by making room, since servers
    have no memory for weights in the trainer's time slice.
    """

    sync: WeightSync
    trainers: Sequence[Trainer]
    pool: ServerPool
    timeout_s: float
    phase: Callable[[str], AbstractContextManager[None]]

    async def to_trainer(self, evaluating: asyncio.Task[None] | None) -> None:
        """Pause the servers and release their memory, then move the trainers in."""
        if evaluating:
            with self.phase("evaluation"):
                await evaluating
        with self.phase("time slice of the trainer"):
            async with time_limit("releasing the servers' memory", self.timeout_s):
                await self.pool.hold(Deadline(self.timeout_s))
            await asyncio.gather(*(trainer.onload() for trainer in self.trainers))

    async def to_servers(self) -> None:
        """Move the trainers out, then give the servers their memory back and resume them."""
        with self.phase("time slice of the servers"):
            await asyncio.gather(*(trainer.offload() for trainer in self.trainers))
            async with time_limit("resuming the servers' memory", self.timeout_s):
                await self.pool.release_hold(Deadline(self.timeout_s))

    async def connect(self) -> None:
        """Connect `sync`."""
        await self.sync.connect()

    async def send(self, version: int, deadline: Deadline) -> None:
        """Make room for the servers' weights and send them."""
        await asyncio.gather(*(trainer.offload(BESIDE_WEIGHTS) for trainer in self.trainers))
        await self.pool.take_weights_back(deadline)
        await self.sync.send(version, deadline)


def share_gpus(
    config: RunConfig,
    sync: WeightSync,
    trainers: Sequence[Trainer],
    pool: ServerPool,
    phase: Callable[[str], AbstractContextManager[None]],
) -> tuple[Sharing, WeightSync]:
    """Return the object that switches the GPUs (`rollout.sharing`), and the weight transport to use with it."""
    if not config.rollout.alternates:
        return RESIDENT, sync
    alternate = Alternate(sync, trainers, pool, config.weight_update.timeout_s, phase)
    return alternate, alternate


async def connect(
    cluster: RunCluster,
    job: Job,
    serving: Serving,
    trainers: Mapping[TrainerRole, Trainer],
    version: int,
    phase: Callable[[str], AbstractContextManager[None]],
) -> tuple[Sharing, WeightSync]:
    """Send the trainer's weights to the servers as `version`; return what switches their GPUs, and the transport.

    Time-shared GPUs are the trainer's afterwards.
    """
    config, trainer = job.config, trainers["actor"]
    adapters = {name: trainer.using(name) for name in config.adapters}
    transport = weight_sync(cluster, job, trainer, serving.pool, serving.source, adapters)
    sharing, sync = share_gpus(config, transport, tuple(trainers.values()), serving.pool, phase)
    await sharing.to_trainer(None)
    await sync.connect()
    await publish(sync, version, config.weight_update.timeout_s)
    return sharing, sync
