"""Trains on ready servers, with a trainer that is replaced at each restart."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from areal_like.capability import Started, make_hooks
from areal_like.core.gc_tuning import gc_tuned
from areal_like.core.loop.loop import Parts, reinforce
from areal_like.core.loop.step import Models
from areal_like.core.loop.stopping import Stop
from areal_like.core.rollout.collector import token_ledger
from areal_like.run.directory import RunDirectory
from areal_like.run.gpu_sharing import connect
from areal_like.run.parts import make_adapter_parts, make_parts, make_results
from areal_like.run.ready import Run, Serving, Trainers


async def train(run: Run, trainers: Trainers, opened: RunDirectory, stop: Stop) -> None:
    """Bring the weights to the servers and train from the place of `opened`."""
    cluster, job, serving, config = run.cluster, run.job, run.serving, run.job.config
    pool, state, record, trainer = serving.pool, opened.state, opened.record, trainers.roles["actor"]
    adapters = {name: trainer.using(name) for name in config.adapters}
    with record.doing("connecting trainer and servers"):
        sharing, sync = await connect(cluster, job, serving, trainers.roles, state.version, record.phase)
    started = Started(
        job=job,
        jobs={own.adapter or "": own for own in job.adapters or (job,)},
        policies=adapters or {"": trainer},
        trainers=trainers.roles,
        pool=pool,
        sync=sync,
        teacher=serving.teacher,
        record=record,
        recovery=stop.recovery,
        shared_dir=cluster.shared_dir,
        on_nodes=cluster.on_nodes,
        resumed=state.version if opened.checkpoint else None,
        say=run.view.say,
    )
    async with asyncio.TaskGroup() as groups:  # which use the pools: when one fails, they end before those
        parts = await _make_parts(started, serving, trainers, opened, groups)
        parts = replace(parts, recovery=stop.recovery, stop=stop, sharing=sharing)
        with stop.accept():
            async with gc_tuned():
                await reinforce(config, parts, job.steps, record, state if opened.checkpoint else None)


async def _make_parts(
    started: Started, serving: Serving, trainers: Trainers, opened: RunDirectory, groups: asyncio.TaskGroup
) -> Parts:
    """Return the parts of the run with its hooks; the groups of prompts are tasks of `groups`."""
    job, state, sync, pool = started.job, opened.state, started.sync, started.pool
    results = await asyncio.to_thread(make_results, job, state.version, opened.journal)
    if job.adapters:
        parts = make_adapter_parts(job, state, started.policies, sync, serving.scoring, groups)
    else:
        rewards, workflows = serving.scoring[""]
        trainer = started.policies[""]
        parts = make_parts(job, state, trainer, sync, rewards, workflows, groups, serving.teacher, results)
    collector, evaluator, baselines = parts.collector, parts.evaluator, results.baselines if results else None
    return replace(
        parts,
        models=Models(trainers.reference, trainers.roles.get("critic"), baselines),
        statistics=(*parts.statistics, lambda: token_ledger(pool, collector, evaluator.tokens), pool.statistics),
        hooks=make_hooks(started),
        load=pool.load,
    )
