"""Assembles a checked run on its cluster, has the loop train it, and ends it as a whole."""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from areal_like.cluster.run import Cluster, run_cluster
from areal_like.cluster.workers import WorkerGroup
from areal_like.config.schema import RewardModelConfig, RunConfig, TrainerRole
from areal_like.experimental.client_processes import Clients
from areal_like.job import Job
from areal_like.metrics.console import View
from areal_like.rewards.reward_model import RewardModel
from areal_like.rewards.scoring import Rewards
from areal_like.rollout.pool import ServerPool
from areal_like.rollout.token_ledger import token_ledger
from areal_like.run.directory import RunDirectory, run_directory
from areal_like.run.gpu_sharing import share_gpus
from areal_like.run.loop import reinforce
from areal_like.run.model_files import model_directories
from areal_like.run.parts import make_parts
from areal_like.run.recording import make_record, recording
from areal_like.run.start import (
    make_elastic_servers,
    make_supervisor,
    start_client,
    start_reward_model,
    weight_sync,
)
from areal_like.run.startup import saved_trainers, start_all
from areal_like.run.startup_report import startup_report
from areal_like.runtime.gc_tuning import gc_tuned
from areal_like.runtime.watchdog import watched
from areal_like.weights.sync import publish
from areal_like.workflows.make import Workflows, user_processes


async def run(job: Job, view: View) -> None:
    """Execute a run. Afterwards nothing of it is left but its directory.

    Raises PreparationError (DirectoryTaken) before anything is started, and later an ExceptionGroup whose first leaf is
    the first failure.
    """
    config, directory = job.config, job.config.run_dir
    async with run_directory(job, view, partial(make_record, job, view)) as opened:
        with recording(opened.record):
            if opened.state.version < job.steps:
                with opened.record.doing("preparing the model"):
                    models = await model_directories(config, directory)
                logs, shared, uses_gpus = directory / "logs", directory / ".weights", job.device == "cuda"
                view.say(f"starting {job}; output of every process: {logs}")
                for line in startup_report(job):
                    view.say(line)
                async with run_cluster(
                    config.scheduler, job.plan, uses_gpus=uses_gpus, log_dir=logs, shared_dir=shared, lock=opened.lock
                ) as cluster:
                    await _run_on(cluster, job, models, opened, view)
            opened.record.finish()


async def _run_on(
    cluster: Cluster, job: Job, models: Mapping[TrainerRole, Path], opened: RunDirectory, view: View
) -> None:
    config, state, record = job.config, opened.state, opened.record
    playing = user_processes(config, view.say, record.directory / "logs/workflows.log") if config.workflows else None
    stacks = record.directory / "logs/stacks.log"
    async with watched(stacks), playing or nullcontext() as processes, asyncio.TaskGroup() as tasks:
        scorer = config.reward.model
        scoring = tasks.create_task(start_reward_model(cluster, job, scorer)) if scorer else None
        trainers, reference, servers, urls = await start_all(cluster, job, models, opened, view, tasks)
        trainer, spec = trainers["actor"], job.models.get("actor")
        vocab_size = spec.vocab_size if spec else None
        async with (
            _clients(cluster, job, view) as clients,
            _pool(config, urls, cluster.token, clients) as pool,
            _serve_reward_model(scorer, await scoring, cluster.token, tasks)
            if scorer and scoring
            else nullcontext() as model,
            Rewards(
                config.reward, job.tokenizer, model=model, log=record.directory / "logs/rewards.log", say=view.say
            ) as rewards,
            Workflows(config, pool, rewards.score, job.tokenizer, view.say, vocab_size, processes) as workflows,
            asyncio.TaskGroup() as groups,  # which use the pools: when one fails, they end before those
        ):
            if not config.workflows:  # which may score by themselves
                rewards.begin()
            supervisor = make_supervisor(cluster, job, models["actor"], servers, pool, view.say)
            elastic = make_elastic_servers(cluster, job, models["actor"], supervisor)
            watching = [tasks.create_task(supervisor.keep()), tasks.create_task(elastic.keep())]
            transport = weight_sync(cluster, job, trainer, pool)
            sharing, sync = share_gpus(config, transport, tuple(trainers.values()), pool, record.phase)
            with record.doing("connecting trainer and servers"):
                await sharing.to_trainer(None)
                await sync.connect()
                await publish(sync, state.version, config.weight_update.timeout_s)
            parts = make_parts(job, state, trainer, sync, rewards, workflows, groups)
            collector, evaluator = parts.collector, parts.evaluator
            recovery = opened.recovery(config, saved_trainers(config, trainers))
            parts = replace(
                parts,
                reference=reference,
                critic=trainers.get("critic"),
                episodes=workflows.counts,
                tokens=lambda: token_ledger(pool, collector, evaluator.tokens),
                servers=pool.statistics,
                recovery=recovery,
                sharing=sharing,
            )
            async with gc_tuned():
                await reinforce(config, parts, job.steps, record, state if opened.checkpoint else None)
        for task in watching:
            task.cancel()


def _pool(config: RunConfig, urls: list[str], token: str, clients: Clients) -> ServerPool:
    return ServerPool(
        urls,
        token,
        config.rollout.request_timeout_s,
        requests=config.weight_update.requests,
        prefill_once=config.rollout.prefill_once,
        read_answer=clients.read,
    )


def _clients(cluster: Cluster, job: Job, view: View) -> Clients:
    start = partial(start_client, cluster, job.plan.engine("rollout"))
    rollout = job.config.rollout
    return Clients(rollout.client_processes, start, view.say, rollout.request_timeout_s)


@asynccontextmanager
async def _serve_reward_model(
    section: RewardModelConfig, started: tuple[WorkerGroup, list[str], Path], token: str, tasks: asyncio.TaskGroup
) -> AsyncIterator[RewardModel]:
    """Yield the reward model on its servers; if one of them ends, the run ends, since no other can score."""
    servers, urls, directory = started
    watching = tasks.create_task(servers.call_all("watch", phase="scoring", timeout=math.inf))
    async with RewardModel(urls, token, directory, section.timeout_s) as model:
        yield model
    watching.cancel()
