"""Trains on ready servers, with a trainer that is replaced at each restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from areal_like.cluster.run import Cluster
from areal_like.config.schema import TrainerRole
from areal_like.job import Job
from areal_like.metrics.console import View
from areal_like.rollout.pool import ServerPool
from areal_like.rollout.teacher import Teacher
from areal_like.rollout.token_ledger import token_ledger
from areal_like.run.adapter_parts import make_adapter_parts
from areal_like.run.directory import RunDirectory
from areal_like.run.drift import DriftAlarm
from areal_like.run.gpu_sharing import share_gpus
from areal_like.run.loop import reinforce
from areal_like.run.parts import make_moving_teacher, make_parts, make_results
from areal_like.run.scoring import Scoring
from areal_like.run.start import weight_sync
from areal_like.run.stopping import Stop
from areal_like.runtime.gc_tuning import gc_tuned
from areal_like.trainer.reference import Reference
from areal_like.trainer.remote import Trainer
from areal_like.weights.sync import FileSource, WeightSync, publish


@dataclass(frozen=True)
class Serving:
    """The servers and their clients, which outlive a trainer.

    `scoring` is that of several adapters by name, or that of the run by "".
    """

    pool: ServerPool
    scoring: Mapping[str, Scoring]
    teacher: Teacher | None
    source: FileSource | None = None  # of weights that servers download


@dataclass(frozen=True)
class Trainers:
    """Started trainers by role, and the reference if the run has one."""

    roles: Mapping[TrainerRole, Trainer]
    reference: Reference | None


async def train(
    cluster: Cluster,
    job: Job,
    view: View,
    serving: Serving,
    trainers: Trainers,
    opened: RunDirectory,
    stop: Stop,
) -> None:
    """Bring the weights to the servers and train from the place of `opened`."""
    config = job.config
    pool, state, record, trainer = serving.pool, opened.state, opened.record, trainers.roles["actor"]
    adapters = {name: trainer.using(name) for name in config.adapters}
    transport = weight_sync(cluster, job, trainer, pool, serving.source, adapters)
    sharing, sync = share_gpus(config, transport, tuple(trainers.roles.values()), pool, record.phase)
    with record.doing("connecting trainer and servers"):
        await sharing.to_trainer(None)
        await sync.connect()
        await publish(sync, state.version, config.weight_update.timeout_s)
    moving = make_moving_teacher(config, serving.teacher, trainers.roles, cluster.shared_dir)
    if moving and opened.checkpoint:
        await moving.update()  # a checkpoint does not hold the teacher
    results = await asyncio.to_thread(make_results, job, state.version, opened.journal)
    async with asyncio.TaskGroup() as groups:  # which use the pools: when one fails, they end before those
        if adapters:
            alarms = partial(make_drift_alarm, pool=pool, sync=sync, say=view.say)
            parts = make_adapter_parts(job, state, adapters, sync, serving.scoring, groups, alarms)
        else:
            rewards, workflows = serving.scoring[""]
            parts = make_parts(job, state, trainer, sync, rewards, workflows, groups, serving.teacher, results)
            parts = replace(parts, episodes=workflows.counts)
        collector, evaluator = parts.collector, parts.evaluator
        parts = replace(
            parts,
            reference=trainers.reference,
            update_teacher=moving.follow if moving else None,
            critic=trainers.roles.get("critic"),
            tokens=lambda: token_ledger(pool, collector, evaluator.tokens),
            servers=pool.statistics,
            load=pool.load,
            recovery=stop.recovery,
            stop=stop,
            sharing=sharing,
            drift=None if adapters else make_drift_alarm(job, trainer, pool, sync, view.say),
        )
        with stop.accept():
            async with gc_tuned():
                await reinforce(config, parts, job.steps, record, state if opened.checkpoint else None)


def make_drift_alarm(
    job: Job, trainer: Trainer, pool: ServerPool, sync: WeightSync, say: Callable[[str], None]
) -> DriftAlarm | None:
    """Return the drift alarm of a run or of one of its adapters, None without probes (`rollout.drift_probe_tokens`)."""
    if not job.config.rollout.drift_probe_tokens:
        return None
    spec = job.models.get("actor")
    experts, routes = bool(spec and spec.experts), job.routes
    return DriftAlarm(job.config, trainer, pool, sync, say, has_experts=experts, routes=routes, adapter=job.adapter)
