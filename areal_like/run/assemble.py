"""A run that was checked: put together on its cluster, trained by the loop, ended as a whole."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from allocation import render
from allocation.views.svg import plan_svg
from areal_like.checkpoint.state import RunState
from areal_like.cluster.run import Cluster, run_cluster
from areal_like.cluster.workers import WorkerGroup
from areal_like.config.load import dump
from areal_like.config.schema import SINGLE_TURN, RewardModelConfig, RunConfig, TrainerRole
from areal_like.data.stream import PromptStream
from areal_like.events import span
from areal_like.experimental.client_processes import Clients
from areal_like.job import Job
from areal_like.metrics.advice import Advice, Layout
from areal_like.metrics.console import View
from areal_like.metrics.record import Record
from areal_like.metrics.sinks import make_sinks
from areal_like.rewards.reward_model import RewardModel
from areal_like.rewards.scoring import Rewards
from areal_like.rollout.admission import Admission
from areal_like.rollout.collector import Collector
from areal_like.rollout.pool import Sampling, ServerPool
from areal_like.rollout.token_ledger import token_ledger
from areal_like.run.directory import RunDirectory, run_directory
from areal_like.run.evaluation import EvaluationSet, Evaluator
from areal_like.run.gpu_sharing import share_gpus
from areal_like.run.logprob_check import allowed_logprob_diff
from areal_like.run.loop import Parts, reinforce
from areal_like.run.model_files import model_directories
from areal_like.run.start import (
    carry_user_code,
    make_reference,
    make_supervisor,
    start_client,
    start_reward_model,
    start_servers,
    start_trainer,
    weight_sync,
)
from areal_like.run.startup_report import startup_report
from areal_like.run.warm_start import warm_start
from areal_like.run.warmup_step import run_warmup_step, warmup_roles
from areal_like.runtime.gc_tuning import gc_tuned
from areal_like.runtime.watchdog import watched
from areal_like.trainer.reference import Reference
from areal_like.trainer.remote import Trainer
from areal_like.weights.sync import WeightSync, publish
from areal_like.workflows.make import Workflows, user_processes

MOST_DRAWN = 512  # devices in the report's picture of the plan


async def run(job: Job, view: View) -> None:
    """The whole run. When this returns or raises, nothing of it is left but its directory.

    Raises PreparationError (DirectoryTaken) before anything is started, and then an ExceptionGroup whose first leaf is
    what failed first.
    """
    config, directory = job.config, job.config.run_dir
    async with run_directory(job, view, partial(_record, job, view)) as opened:
        with _told(opened.record):
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


@contextmanager
def _told(record: Record) -> Iterator[None]:
    """Keep what the body does, and how it ended."""
    try:
        with record.recording():
            yield
        record.ended("finished")
    except BaseException as error:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        stopped = isinstance(error, KeyboardInterrupt | SystemExit | asyncio.CancelledError)
        record.ended("interrupted" if stopped else f"failed: {error}")
        raise
    finally:
        record.close()


def _record(job: Job, view: View, void_from: int | None) -> Record:
    """The record of a run, which goes on before step `void_from` if that is given."""
    config, stats, directory = job.config, job.config.stats_logger, job.config.run_dir
    return Record(
        directory,
        f"{config.experiment_name} / {config.trial_name}",
        view,
        [*make_sinks(config, directory, void_from), *advice(job, view)],
        about=_about(job),
        report=stats.report,
        decode=partial(job.tokenizer.decode, special=True),
        n_samples=stats.samples,
        n_shown=stats.console_samples,
    )


class _Ready:
    """When the run's parts were ready, in seconds since they were started; those that start side by side overlap."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._seconds: dict[str, float] = {}

    def note(self, part: str) -> None:
        """A part is ready, unless it was before."""
        self._seconds.setdefault(part, time.monotonic() - self._began)

    def __str__(self) -> str:
        return "ready: " + ", ".join(f"{part} after {seconds:.0f} s" for part, seconds in self._seconds.items())


def advice(job: Job, view: View) -> list[Advice]:
    """What says whether asynchrony pays, where trainer and servers are on GPUs of their own, and on no others later."""
    actor, rollout = job.plan.engine("actor"), job.plan.engine("rollout")
    if job.device == "cpu" or job.further_servers or set(actor.devices) & set(rollout.devices):
        return []
    together = [engine for engine in job.plan.engines if set(engine.devices) & set(actor.devices)]
    layout = Layout(
        servers=len(rollout.devices),
        trainer=len(actor.devices),
        server_unit=len(rollout.devices) // rollout.sizes.dp,
        trainer_unit=math.lcm(*(engine.sizes.smallest_world for engine in together)),
        staleness=job.config.rollout.max_head_offpolicyness,
    )
    return [Advice(layout, view.say)]


def _about(job: Job) -> dict[str, Any]:
    """What the report says of a run before it starts."""
    return {
        "steps": job.steps,
        "layout": str(job),
        "staleness": job.config.rollout.max_head_offpolicyness,
        "max_logprob_diff": allowed_logprob_diff(job.config),
        "plan": plan_svg(job.plan) if len(job.plan.devices) <= MOST_DRAWN else "",
        "findings": [render(found) for found in job.warnings],
        "config": dump(job.config),
    }


async def _run_on(
    cluster: Cluster, job: Job, models: Mapping[TrainerRole, Path], opened: RunDirectory, view: View
) -> None:
    config, state, record = job.config, opened.state, opened.record
    playing = user_processes(config, view.say, record.directory / "logs/workflows.log") if config.workflows else None
    stacks = record.directory / "logs/stacks.log"
    async with watched(stacks), playing or nullcontext() as processes, asyncio.TaskGroup() as tasks:
        scorer = config.reward.model
        scoring = tasks.create_task(start_reward_model(cluster, job, scorer)) if scorer else None
        trainers, reference, servers, urls = await _started(cluster, job, models, opened, view, tasks)
        trainer, spec = trainers["actor"], job.models.get("actor")
        vocab_size = spec.vocab_size if spec else None
        async with (
            _clients(cluster, job, view) as clients,
            _pool(config, urls, cluster.token, clients) as pool,
            _scored(scorer, await scoring, cluster.token, tasks) if scorer and scoring else nullcontext() as model,
            Rewards(
                config.reward, job.tokenizer, model=model, log=record.directory / "logs/rewards.log", say=view.say
            ) as rewards,
            Workflows(config, pool, rewards.score, job.tokenizer, view.say, vocab_size, processes) as workflows,
            asyncio.TaskGroup() as groups,  # which use the pools: when one fails, they end before those
        ):
            if not config.workflows:  # which may score by themselves
                rewards.begin()
            supervisor = make_supervisor(cluster, job, models["actor"], servers, pool, view.say)
            watching = tasks.create_task(supervisor.keep())
            transport = weight_sync(cluster, job, trainer, pool)
            sharing, sync = share_gpus(config, transport, tuple(trainers.values()), pool, record.phase)
            with record.doing("connecting trainer and servers"):
                await sharing.to_trainer(None)
                await sync.connect()
                await publish(sync, state.version, config.weight_update.timeout_s)
            parts = _parts(job, state, trainer, sync, rewards, workflows, groups)
            collector, evaluator = parts.collector, parts.evaluator
            recovery = opened.recovery(config, _kept(config, trainers))
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
        watching.cancel()


async def _started(
    cluster: Cluster,
    job: Job,
    models: Mapping[TrainerRole, Path],
    opened: RunDirectory,
    view: View,
    tasks: asyncio.TaskGroup,
) -> tuple[dict[TrainerRole, Trainer], Reference | None, WorkerGroup, list[str]]:
    """Trainers, reference, servers and their URLs, all of them ready."""
    record, ready = opened.record, _Ready()
    start = partial(start_servers, cluster, job, models["actor"])
    starting = None if job.config.rollout.alternates else tasks.create_task(start())
    if starting:
        starting.add_done_callback(lambda _: ready.note("servers"))
    trainers, reference = await _ready_trainers(cluster, job, models, opened, view, ready)
    if warmup_roles(job):
        with record.doing("running a warm-up step"):
            await run_warmup_step(job, trainers)
        ready.note("warm-up step")
    with record.doing("starting the servers"):
        if starting is None:  # servers take what memory they find
            await asyncio.gather(*(each.offload() for each in trainers.values()))
        servers, urls = await (starting or start())
    ready.note("servers")
    view.say(str(ready))
    return trainers, reference, servers, urls


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
async def _scored(
    section: RewardModelConfig, started: tuple[WorkerGroup, list[str], Path], token: str, tasks: asyncio.TaskGroup
) -> AsyncIterator[RewardModel]:
    """The model on its servers, whose end is that of the run: what they score cannot be had elsewhere."""
    servers, urls, directory = started
    watching = tasks.create_task(servers.call_all("watch", phase="scoring", timeout=math.inf))
    async with RewardModel(urls, token, directory, section.timeout_s) as model:
        yield model
    watching.cancel()


async def _trainers(cluster: Cluster, job: Job, models: Mapping[TrainerRole, Path]) -> dict[TrainerRole, Trainer]:
    """The trainer of every role, started side by side."""
    carry_user_code(job.algorithm)
    async with asyncio.TaskGroup() as tasks:
        starting = {
            role: tasks.create_task(start_trainer(cluster, job, models[role], role)) for role in job.config.roles
        }
    return {role: task.result() for role, task in starting.items()}


async def _ready_trainers(
    cluster: Cluster,
    job: Job,
    models: Mapping[TrainerRole, Path],
    opened: RunDirectory,
    view: View,
    ready: _Ready,
) -> tuple[dict[TrainerRole, Trainer], Reference | None]:
    """All trainers, with the weights that the run begins or goes on with."""
    config, checkpoint, record = job.config, opened.checkpoint, opened.record
    with record.doing("starting the trainer"):
        trainers = await _trainers(cluster, job, models)
    ready.note("trainer")
    reference = make_reference(cluster, job, trainers)
    if checkpoint:
        with record.doing("loading the checkpoint"):
            kept = _kept(config, trainers)
            await asyncio.gather(*(each.load(checkpoint.path / role) for role, each in kept.items()))
        return trainers, reference
    with span("controller", "warm start"):
        await warm_start(job, trainers["actor"], view)
    if reference and config.warm_start and config.ref and config.ref.path is None:
        await reference.update(decay=0.0)  # the policy that reinforcement learning begins with
    return trainers, reference


def _kept(config: RunConfig, trainers: Mapping[TrainerRole, Trainer]) -> dict[TrainerRole, Trainer]:
    """The trainers that a checkpoint has: a reference that stays what its path says is loaded from there."""
    ref = config.ref
    moves = ref is not None and (ref.update_every_steps is not None or (config.warm_start and ref.path is None))
    return {role: trainer for role, trainer in trainers.items() if role != "ref" or moves}


def _parts(
    job: Job,
    state: RunState,
    trainer: Trainer,
    sync: WeightSync,
    rewards: Rewards,
    workflows: Workflows,
    tasks: asyncio.TaskGroup,
) -> Parts:
    config = job.config
    sampling, train_data, stop = config.gconfig, config.train_dataset, job.tokenizer.eos_token_ids
    most = config.rollout.max_concurrent_rollouts
    collector = Collector(
        prompts=PromptStream(
            job.train_prompts, shuffle=train_data.shuffle, seed=config.seed, weights=train_data.weights
        ),
        groups=job.steps * train_data.batch_size,
        workflow=workflows.train(
            Sampling(sampling.max_new_tokens, sampling.temperature, sampling.top_p, stop),
            sampling.n_samples,
            seed=config.seed if config.sglang.deterministic else None,
        ),
        admission=Admission(
            train_data.batch_size,
            config.rollout.max_head_offpolicyness,
            state.version,
            spare=math.ceil(config.rollout.oversampling * train_data.batch_size),
        ),
        max_groups=max(1, most // sampling.n_samples) if most else None,
        tasks=tasks,
        keeps=job.algorithm.keeps,
        max_drops=config.actor.max_dropped_groups,
        again=state.untrained,
        started=state.started,
        dropped=state.dropped(train_data.batch_size),
        tokens_generated=state.tokens_generated,
    )
    evaluator = Evaluator(config.evaluator, _evaluation_sets(job, workflows))
    return Parts(job.algorithm, trainer, sync, collector, evaluator, rewards)


def _evaluation_sets(job: Job, workflows: Workflows) -> dict[str, EvaluationSet]:
    sets = {}
    for name, data in job.config.evaluations.items():
        n_samples, most = data.n_samples or 1, data.max_new_tokens or job.config.gconfig.max_new_tokens
        sampling = Sampling(most, data.temperature or 0.0, stop_token_ids=job.tokenizer.eos_token_ids)
        sets[name] = EvaluationSet(
            job.evaluated[name], workflows.evaluate(data.workflow or SINGLE_TURN, sampling, n_samples), n_samples
        )
    return sets
