"""The attempts of a run to train: the first one, and one after each restart of its trainer."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, cast

from areal_like.backends.ray.workers import WorkerGroup
from areal_like.core.checkpoint.files import call_disk
from areal_like.core.errors import WorkerError
from areal_like.core.loop.stopping import Stop
from areal_like.run.directory import RunDirectory
from areal_like.run.lost_nodes import find_layout, find_lost_devices, map_devices, regain, trainer_devices
from areal_like.run.ready import Run, Trainers
from areal_like.run.recording import open_sinks
from areal_like.run.startup import StartupTimes, ready_trainers, saved_trainers
from areal_like.run.trainer_restarts import StartedTrainer, train_to_the_end

type Train = Callable[[Run, Trainers, RunDirectory, Stop], Coroutine[Any, Any, None]]


async def train_on(run: Run, train: Train, trainers: Trainers, opened: RunDirectory) -> None:
    """Train to the last step by `train`; the trainer is restarted where it is lost (`recover.restarts_per_hour`)."""
    config = run.job.config
    place = opened  # of the present attempt

    async def restart(_: WorkerError) -> StartedTrainer:
        nonlocal place
        _end_trainers(run)
        here = await _fitting(run)
        place = await call_disk(place.roll_back, partial(open_sinks, here.job), run.view.say)
        return await _attempt(here, train, await _start_trainers(here, place), place)

    await train_to_the_end(
        await _attempt(run, train, trainers, opened),
        restart,
        config.trainer_restarts,
        config.host_timeout_s,
        run.view.say,
    )


def _end_trainers(run: Run) -> None:
    for group in [group for group in run.cluster.groups if group.role in run.job.config.roles]:
        run.cluster.end_group(group)


async def _fitting(run: Run) -> Run:
    """Return the run with its trainer where nodes answer, in one of `recover.layouts` if the present one does not fit.

    Without a layout that fits it waits for nodes.
    """
    cluster, job, say = run.cluster, run.job, run.view.say
    if (answer_s := job.config.host_timeout_s) is None:
        return run
    devices = trainer_devices(job)
    if not (lost := await find_lost_devices(cluster, devices, answer_s)):
        return run
    if layout := find_layout(job.layouts, devices, lost):
        say(f"The trainer continues as {layout.plan.engine('actor').text} (recover.layouts).")
        return replace(run, cluster=cluster.using(map_devices(layout, devices, lost)), job=layout)
    await regain(cluster, lost, answer_s, uses_gpus=job.device == "cuda", say=say)
    return run


async def _start_trainers(run: Run, opened: RunDirectory) -> Trainers:
    times = StartupTimes()
    trainers = await ready_trainers(run.cluster, run.job, run.models, opened, run.view, times)
    run.view.say(str(times))
    return trainers


async def _attempt(run: Run, train: Train, trainers: Trainers, opened: RunDirectory) -> StartedTrainer:
    recovery = opened.recovery(run.job.config, saved_trainers(run.job.config, trainers.roles))

    async def settle() -> None:
        run.serving.pool.reset_ledger()
        if recovery:
            await recovery.settle()

    groups = [cast(WorkerGroup, trainer.ranks) for trainer in trainers.roles.values()]
    return StartedTrainer(
        groups,
        await run.cluster.beats(groups),
        lambda: train(run, trainers, opened, Stop(recovery, run.view.say)),
        settle,
    )
