"""Starts the processes of a run side by side."""

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from areal_like.backends.ray.run import RunCluster
from areal_like.backends.ray.workers import WorkerGroup
from areal_like.core.config.schema import RunConfig, TrainerRole
from areal_like.core.events import span
from areal_like.core.trainer.remote import Trainer
from areal_like.job import Job
from areal_like.metrics.console import View
from areal_like.run.directory import RunDirectory
from areal_like.run.ready import Trainers
from areal_like.run.servers import start_servers
from areal_like.run.start import carry_user_code, make_reference, start_trainer
from areal_like.run.warmup import run_warmup_step, warm_start, warmup_roles


class StartupTimes:
    """Seconds until each part of the run was ready; parts that start side by side overlap."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._seconds: dict[str, float] = {}

    def note(self, part: str) -> None:
        """Note that a part is ready, once."""
        self._seconds.setdefault(part, time.monotonic() - self._began)

    def __str__(self) -> str:
        return "ready: " + ", ".join(f"{part} after {seconds:.0f} s" for part, seconds in self._seconds.items())


async def start_all(
    cluster: RunCluster,
    job: Job,
    models: Mapping[TrainerRole, Path],
    opened: RunDirectory,
    view: View,
    tasks: asyncio.TaskGroup,
) -> tuple[Trainers, WorkerGroup, list[str]]:
    """Start trainers, reference and servers; return them ready, with the servers' URLs."""
    record, ready = opened.record, StartupTimes()
    start = partial(start_servers, cluster, job, models["actor"])
    starting = None if job.config.rollout.alternates else tasks.create_task(start())
    if starting:
        starting.add_done_callback(lambda _: ready.note("servers"))
    trainers = await ready_trainers(cluster, job, models, opened, view, ready)
    if warmup_roles(job):
        with record.doing("running a warm-up step"):
            await run_warmup_step(job, trainers.roles)
        ready.note("warm-up step")
    with record.doing("waiting for the servers"):
        if starting is None:  # servers take all free memory
            await asyncio.gather(*(each.offload() for each in trainers.roles.values()))
        servers, urls = await (starting or start())
    ready.note("servers")
    view.say(str(ready))
    return trainers, servers, urls


async def _trainers(cluster: RunCluster, job: Job, models: Mapping[TrainerRole, Path]) -> dict[TrainerRole, Trainer]:
    """Start the trainers of all roles side by side."""
    for each in job.adapters or [job]:
        carry_user_code(each.algorithm)
    async with asyncio.TaskGroup() as tasks:
        starting = {
            role: tasks.create_task(start_trainer(cluster, job, models[role], role)) for role in job.config.roles
        }
    return {role: task.result() for role, task in starting.items()}


async def ready_trainers(
    cluster: RunCluster,
    job: Job,
    models: Mapping[TrainerRole, Path],
    opened: RunDirectory,
    view: View,
    ready: StartupTimes,
) -> Trainers:
    """Return all trainers with the weights that the run starts or resumes from."""
    config, checkpoint, record = job.config, opened.checkpoint, opened.record
    with record.doing("starting the trainer"):
        trainers = await _trainers(cluster, job, models)
    ready.note("trainer")
    reference = make_reference(cluster, job, trainers)
    if checkpoint:
        with record.doing("loading the checkpoint"):
            kept = saved_trainers(config, trainers)
            await asyncio.gather(*(each.load(checkpoint.path / role) for role, each in kept.items()))
        return Trainers(trainers, reference)
    with span("controller", "warm start"):
        await warm_start(job, trainers["actor"], view)
    if reference and config.warm_start and config.ref and config.ref.path is None:
        await reference.update(decay=0.0)  # the policy that reinforcement learning begins with
    return Trainers(trainers, reference)


def saved_trainers(config: RunConfig, trainers: Mapping[TrainerRole, Trainer]) -> dict[TrainerRole, Trainer]:
    """Return the trainers that a checkpoint contains; a reference that never changes is loaded from its path."""
    ref = config.ref
    moves = ref is not None and (ref.update_every_steps is not None or (config.warm_start and ref.path is None))
    return {role: trainer for role, trainer in trainers.items() if role != "ref" or moves}
