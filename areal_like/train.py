"""Puts a run together on its cluster: trainer, servers, weight sync, rollouts; then lets the loop train."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError

from allocation import EnginePlan, Plan
from areal_like.cluster.run import Cluster, run_cluster
from areal_like.cluster.workers import WorkerGroup
from areal_like.config.load import dump
from areal_like.config.schema import RunConfig
from areal_like.data.dataset import PromptStream
from areal_like.data.tokenizer import Tokenizer
from areal_like.demo.init_model import write_init_model
from areal_like.errors import DirectoryTaken, PreparationError
from areal_like.loop import Parts, reinforce
from areal_like.metrics.console import View
from areal_like.metrics.record import Record
from areal_like.preflight.checks import CONFIG_FILE
from areal_like.preflight.model import is_local
from areal_like.rewards import REWARDS, RewardPool
from areal_like.rollout.admission import Admission
from areal_like.rollout.collector import Collector, Score
from areal_like.rollout.pool import Sampling, ServerPool
from areal_like.rollout.sglang.options import server_arguments
from areal_like.rollout.sglang.process import ServerSpec, SGLangServer
from areal_like.trainer.rank import TrainerRank
from areal_like.trainer.remote import Trainer
from areal_like.types import Prompt
from areal_like.warm_start import examples, warm_start
from areal_like.weights.collective.controller import CollectiveSync
from areal_like.weights.disk.controller import DiskSync
from areal_like.weights.sync import WeightSync, publish


@dataclass(frozen=True)
class Job:
    """A run that may start: its configuration and what the checks made of it."""

    config: RunConfig
    device: Literal["cpu", "cuda"]
    plan: Plan
    tokenizer: Tokenizer
    train_prompts: Sequence[Prompt]
    valid_prompts: Sequence[Prompt]
    steps: int


async def run(job: Job, view: View) -> None:
    """The whole run. When this returns or raises, nothing of it is left but its directory.

    Raises PreparationError (DirectoryTaken) before anything is started, and then an ExceptionGroup whose first leaf is
    what failed first.
    """
    config = job.config
    directory = config.run_dir
    title = f"{config.experiment_name} / {config.trial_name}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / CONFIG_FILE).open("x") as file:  # of runs that start together, one has the directory
            file.write(dump(config))
        record = Record(directory, title, view, config.stats_logger.tensorboard)
    except FileExistsError as error:
        raise DirectoryTaken(
            f"{directory} belongs to a run that started at the same time; set trial_name to another name"
        ) from error
    except OSError as error:
        raise PreparationError(
            f"{directory} (cluster.fileroot) cannot be written: {error.strerror or error}"
        ) from error
    try:
        with view.doing("preparing the model"):
            model = await asyncio.to_thread(_model_directory, config, directory)
        view.say(f"starting {_describe(job)}; output of every process: {directory / 'logs'}")
        async with run_cluster(
            config.scheduler,
            job.plan,
            uses_gpus=job.device == "cuda",
            log_dir=directory / "logs",
            shared_dir=directory / ".weights",
        ) as cluster:
            await _run_on(cluster, job, model, record, view)
        record.finish()
    finally:
        record.close()


async def _run_on(cluster: Cluster, job: Job, model: Path, record: Record, view: View) -> None:
    config = job.config
    async with asyncio.TaskGroup() as tasks:
        starting = tasks.create_task(_start_servers(cluster, job, model))
        with view.doing("starting the trainer"):
            trainer = await _start_trainer(cluster, job, model)
        if config.warm_start and config.valid_dataset:  # the checks refuse the one without the other
            stream = PromptStream(job.train_prompts, shuffle=True, seed=config.seed)
            steps, reward = await warm_start(
                config.warm_start,
                trainer,
                examples(stream, job.tokenizer),
                list(examples(job.valid_prompts, job.tokenizer)),
                config.gconfig.temperature,
                view,
            )
            view.say(f"warm start: expected held-out reward {reward:.3f} after {steps} steps")
        with view.doing("starting the servers"):
            servers, urls = await starting
        watching = tasks.create_task(servers.call_all("watch", phase="serving", timeout=math.inf))
        async with (
            ServerPool(
                urls,
                cluster.token,
                config.rollout.request_timeout_s,
                partial_rollout=config.rollout.partial_rollout,
                prefill_once=config.rollout.prefill_once,
            ) as pool,
            RewardPool(
                REWARDS[config.reward.type], timeout_s=config.reward.timeout_s, workers=config.reward.workers
            ) as rewards,
            asyncio.TaskGroup() as groups,  # which use the pools: when one fails, they end before those
        ):
            sync = _weight_sync(cluster, job, trainer, pool)
            with view.doing("connecting trainer and servers"):
                await sync.connect()
                await publish(sync, 0, config.weight_update.timeout_s)
            parts = _parts(job, trainer, pool, sync, rewards, groups)
            await reinforce(config, parts, job.steps, record)
        watching.cancel()


async def _start_trainer(cluster: Cluster, job: Job, model: Path) -> Trainer:
    config, plan = job.config, job.plan.engine("actor")
    limit = config.actor.timeout_s
    ranks = await cluster.start_group(
        "actor",
        TrainerRank,
        [(device,) for device in plan.devices],
        lambda rank, host: {"rank": rank, "world_size": plan.world_size, "address": host},
        call_timeout_s=limit,
    )
    address, port = await ranks.call_one(0, "listen", phase="start-up")
    engine = {
        "actor": config.actor,
        "path": model,
        "tokenizer": job.tokenizer.directory,
        "scratch": cluster.shared_dir,
        "sizes": plan.sizes,
        "device": job.device,
        "seed": config.seed,
        "total_steps": job.steps * config.actor.ppo_n_minibatches,
    }
    await ranks.call_all("build", address, port, limit, engine, phase="start-up")
    return Trainer(ranks)


async def _start_servers(cluster: Cluster, job: Job, model: Path) -> tuple[WorkerGroup, list[str]]:
    config, plan = job.config, job.plan.engine("rollout")

    def spec(rank: int, host: str) -> dict[str, object]:
        name = f"server-{rank}"
        port = None if config.sglang.port is None else config.sglang.port + rank
        log_file = (cluster.log_dir / f"{name}.log").absolute()
        return {
            "spec": ServerSpec(
                name=name,
                arguments=server_arguments(config, model, plan.sizes, job.device, rank),
                log_file=log_file,
                token=cluster.token,
                port=port,
                startup_timeout_s=config.rollout.startup_timeout_s,
            ),
            "host": host,
        }

    servers = await cluster.start_group(
        "rollout",
        SGLangServer,
        [server.devices for server in plan.servers],
        spec,
        call_timeout_s=config.rollout.startup_timeout_s + 10,  # the server's own limit speaks first
    )
    return servers, await servers.call_all("start", phase="start-up")


def _weight_sync(cluster: Cluster, job: Job, trainer: Trainer, pool: ServerPool) -> WeightSync:
    update = job.config.weight_update
    if update.mode == "disk":
        return DiskSync(trainer, pool, cluster.shared_dir, update.timeout_s)
    actor, rollout = job.plan.engine("actor"), job.plan.engine("rollout")
    return CollectiveSync(
        trainer,
        pool,
        ranks_per_server=rollout.sizes.tp * rollout.sizes.pp,
        backend=collective_backend(actor, rollout, job.device),
        bucket_mb=update.bucket_mb,
        timeout_s=update.timeout_s,
    )


def collective_backend(actor: EnginePlan, rollout: EnginePlan, device: str) -> Literal["gloo", "nccl"]:
    """nccl between GPUs; gloo on CPU, and where trainer rank 0 shares a GPU with a server, which nccl refuses."""
    return "gloo" if device == "cpu" or actor.devices[0] in rollout.devices else "nccl"


def _parts(
    job: Job, trainer: Trainer, pool: ServerPool, sync: WeightSync, rewards: RewardPool, tasks: asyncio.TaskGroup
) -> Parts:
    config = job.config
    stop = job.tokenizer.eos_token_ids
    score = _score(job, rewards)
    collector = Collector(
        prompts=PromptStream(job.train_prompts, shuffle=config.train_dataset.shuffle, seed=config.seed),
        groups=job.steps * config.train_dataset.batch_size,
        n_samples=config.gconfig.n_samples,
        sampling=Sampling(config.gconfig.max_new_tokens, config.gconfig.temperature, config.gconfig.top_p, stop),
        seed=config.seed if config.sglang.deterministic else None,
        admission=Admission(config.train_dataset.batch_size, config.rollout.max_head_offpolicyness),
        max_concurrent=config.rollout.max_concurrent_rollouts,
        pool=pool,
        score=score,
        tasks=tasks,
    )
    return Parts(trainer, pool, sync, collector, score, job.valid_prompts, stop)


def _score(job: Job, rewards: RewardPool) -> Score:
    async def score(prompt: Prompt, responses: Sequence[Sequence[int]]) -> list[float | None]:
        texts = [job.tokenizer.decode(response) for response in responses]
        return await rewards.score(texts, [prompt.answer] * len(texts))

    return score


def _model_directory(config: RunConfig, directory: Path) -> Path:
    """Where the model lies in Hugging Face form; made or downloaded if it does not yet. Raises PreparationError."""
    if config.actor.init_model:
        made = directory / "initial_model"
        try:
            write_init_model(config.actor.init_model, made, seed=config.seed, dtype=config.actor.dtype)
        except (OSError, SafetensorError) as error:
            raise PreparationError(f"the model (actor.init_model) cannot be written to {made}: {error}") from error
        return made.absolute()
    path = str(config.actor.path)
    if is_local(path):
        return Path(path).absolute()
    import httpx
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path))
    except (OSError, httpx.HTTPError) as error:  # those of the hub are both
        raise PreparationError(f"{path} (actor.path) cannot be downloaded: {error}") from error


def _describe(job: Job) -> str:
    engines = ", ".join(f"{engine.role} {engine.text}" for engine in job.plan.engines)
    return f"{engines} on {len(job.plan.devices)} {'GPUs' if job.device == 'cuda' else 'CPU slots'}"
