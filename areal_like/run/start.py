"""Starts the processes of a job where its plan places them: trainer ranks, servers, and the weight transport."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from allocation.plan import Device, EnginePlan, Plan
from areal_like.backends.ray.run import RunCluster
from areal_like.backends.ray.workers import WorkerGroup
from areal_like.backends.training.rank import TrainerRank
from areal_like.core.algorithms.types import Algorithm
from areal_like.core.config.schema import (
    SCORERS,
    ActorConfig,
    ChatJudgeConfig,
    EngineConfig,
    RewardModelConfig,
    TeacherConfig,
    TrainerRole,
)
from areal_like.core.events import span
from areal_like.core.rollout.backends import find_backend
from areal_like.core.rollout.pool import ServerPool
from areal_like.core.rollout.server import ServerSpec
from areal_like.core.served_form import Convert, served_form
from areal_like.core.trainer.engine import EngineSpec, LoRA
from areal_like.core.trainer.remote import Reference, Trainer
from areal_like.core.transfer import FileSource
from areal_like.core.weights import SyncSpec, WeightSync, compare_checksums, make_sender, make_sync
from areal_like.job import Job
from areal_like.run.model_files import local_directory
from areal_like.run.supervisor import ServerSupervisor


async def start_trainer(cluster: RunCluster, job: Job, model: Path, role: TrainerRole) -> Trainer:
    """Start all ranks of a role and load the model."""
    plan, limit = job.plan.engine(role), job.config.roles[role].timeout_s
    ranks = await cluster.start_group(
        role,
        TrainerRank,
        [(device,) for device in plan.devices],
        lambda rank, host: {"rank": rank, "world_size": plan.world_size, "address": host},
        call_timeout_s=limit,
    )
    address, port = await ranks.call_one(0, "listen", ranks.meeting_host, phase="start-up")
    engine = engine_spec(job, role, model, cluster.shared_dir)
    sender = partial(make_sender, job.config.weight_update.transport, convert=_conversion(job, role))
    await ranks.call_all("build", address, port, limit, engine, sender, phase="start-up")
    return Trainer(ranks)


def _conversion(job: Job, role: TrainerRole) -> Convert | None:
    """Return the function that makes weights into the form of the servers, None where it is the trainer's."""
    form = served_form(job.config) if role == "actor" else None
    return None if form is None else form.convert(job.models[role], job.plan.engine("rollout").sizes)


def engine_spec(job: Job, role: TrainerRole, model: Path, scratch: Path | None) -> EngineSpec:
    """Return the specification that every rank of a role receives."""
    plan = job.plan.engine(role)
    return EngineSpec(
        role=role,
        config=job.config.roles[role],
        optimizer=job.config.optimizer(role),
        lora=_lora(job.config.actor) if role == "actor" else None,
        backend=plan.backend,
        path=model,
        weights=_initial_weights(job.config.roles[role]),
        tokenizer=job.tokenizer.directory,
        scratch=scratch,
        sizes=plan.sizes,
        device=job.device,
        seed=job.config.seed,
        total_steps=job.config.updates(role, job.steps),
        adapters=tuple(job.config.adapters) if role == "actor" else (),
        shape=job.models.get(role),
        copy_bytes=None if (limit := job.config.recover.host_copy_gb) is None else int(limit * 1e9),
    )


def _initial_weights(config: EngineConfig) -> Path | None:
    """Return the Megatron checkpoint that a role starts from, absolute as ranks have directories of their own."""
    start = config.megatron
    return Path(str(start.dist_checkpointing_path)).absolute() if start.use_dist_checkpointing else None


def _lora(actor: ActorConfig) -> LoRA | None:
    """Return the actor's adapters, if they are trained."""
    return LoRA(actor.lora_rank, actor.lora_alpha, tuple(actor.target_modules)) if actor.use_lora else None


def carry_user_code(algorithm: Algorithm) -> None:
    """Register a user's losses with Ray by value: ranks cannot import the user's file."""
    from ray.cloudpickle import register_pickle_by_value

    for module in algorithm.user_modules:
        register_pickle_by_value(module)


def make_reference(cluster: RunCluster, job: Job, trainers: Mapping[TrainerRole, Trainer]) -> Reference | None:
    """Start the reference, if the run has one."""
    section, actor = job.config.ref, trainers["actor"]
    return Reference(section, trainers.get("ref", actor), actor, cluster.shared_dir) if section else None


async def start_servers(cluster: RunCluster, job: Job, model: Path) -> tuple[WorkerGroup, list[str]]:
    """Start all servers; return them ready for requests, and their URLs."""
    devices = [server.devices for server in job.plan.engine("rollout").servers]
    with span("servers", "starting the servers"):
        servers = await _server_actors(cluster, job, model, devices)
        return servers, await servers.call_all("start", phase="start-up")


def make_supervisor(
    cluster: RunCluster, job: Job, model: Path, servers: WorkerGroup, pool: ServerPool, say: Callable[[str], None]
) -> ServerSupervisor:
    """Return the server supervisor; with time-shared GPUs it never restarts a server, which would find no memory."""
    rollout = job.config.rollout
    return ServerSupervisor(
        servers,
        pool,
        max_restarts=0 if rollout.alternates else rollout.max_restarts,
        min_servers=rollout.min_servers,
        say=say,
        replace=partial(_replaced_server, cluster, job, model, say),
        host_timeout_s=job.config.host_timeout_s,
    )


@asynccontextmanager
async def _replaced_server(
    cluster: RunCluster, job: Job, model: Path, say: Callable[[str], None], rank: int
) -> AsyncIterator[WorkerGroup]:
    """Yield a new actor for a server of the layout: on its GPUs while their node lives, else wherever there is room."""
    devices = job.plan.engine("rollout").servers[rank].devices
    if await cluster.lives(devices):
        group = await _server_actors(cluster, job, model, [devices], rank)
        try:
            yield group
        finally:
            cluster.end_group(group)
        return
    waits = f"Server {rank} was lost with its node. It restarts once the cluster has room: "
    plan, uses_gpus = _one_server(job), job.device == "cuda"
    async with cluster.relocate(devices, plan, uses_gpus=uses_gpus, say=lambda why: say(waits + why)) as (room, there):
        yield await _server_actors(room, job, model, [there], rank)


def _one_server(job: Job) -> Plan:
    """Return a plan of any GPUs of one node, as many as a server of the layout has."""
    rollout = job.plan.engine("rollout")
    one = replace(rollout, sizes=replace(rollout.sizes, dp=1), gpus=(range(rollout.sizes.per_replica),))
    return replace(job.plan, allocation="", engines=(one,))


async def _server_actors(
    cluster: RunCluster, job: Job, model: Path, devices: Sequence[Sequence[Device]], first_rank: int = 0
) -> WorkerGroup:
    """Start the actors of servers, the first with `first_rank`, each on its own devices."""
    config, plan = job.config, job.plan.engine("rollout")
    limit, backend, form = config.rollout.startup_timeout_s, find_backend(plan.backend), served_form(config)
    options = None if form is None else form.options(job.models["actor"], plan.sizes)

    def arguments(rank: int, host: str) -> dict[str, Any]:
        name, port = f"server-{rank}", config.sglang.port and config.sglang.port + rank
        command = backend.arguments(config, model, plan.sizes, job.device, rank, job.served, options)
        log_file = (cluster.log_dir / f"{name}.log").absolute()
        return {"spec": ServerSpec(name, command, log_file, cluster.token, port, limit), "host": host}

    return await cluster.start_group(
        "rollout",
        backend.actor,
        devices,
        arguments,
        call_timeout_s=limit + 10,  # the server's own limit speaks first
        first_rank=first_rank,
    )


@dataclass(frozen=True)
class Scorer:
    """The servers of a model that only scores, ready for requests at `urls`, and where the model lies."""

    servers: WorkerGroup
    urls: Sequence[str]
    directory: Path


async def start_scorer(
    cluster: RunCluster, job: Job, role: str, section: RewardModelConfig | TeacherConfig | ChatJudgeConfig
) -> Scorer:
    """Start the servers of the reward model, of the teacher or of the judge."""
    plan, limit = job.plan.engine(role), job.config.rollout.startup_timeout_s
    directory = await local_directory(str(section.path), f"{SCORERS[role]}.path")
    backend, classifies = find_backend(plan.backend), isinstance(section, RewardModelConfig)
    if backend.scorer_arguments is None:
        raise ValueError(f"servers of {plan.backend} do not score")
    command = backend.scorer_arguments(job.config, section, directory, plan.sizes, job.device)

    def arguments(rank: int, host: str) -> dict[str, object]:
        name = f"{role}-{rank}"
        log_file = (cluster.log_dir / f"{name}.log").absolute()
        return {"spec": ServerSpec(name, command, log_file, cluster.token, None, limit, classifies), "host": host}

    devices = [server.devices for server in plan.servers]
    servers = await cluster.start_group(role, backend.actor, devices, arguments, call_timeout_s=limit + 10)
    return Scorer(servers, await servers.call_all("start", phase="start-up"), directory)


def weight_sync(
    cluster: RunCluster,
    job: Job,
    trainer: Trainer,
    pool: ServerPool,
    source: FileSource | None = None,
    adapters: Mapping[str, Trainer] | None = None,
) -> WeightSync:
    """Return the weight transport of the run; servers download files from the `source`, if there is one.

    `adapters` are the trainers of several adapters, by name.
    """
    update, actor, rollout = job.config.weight_update, job.plan.engine("actor"), job.plan.engine("rollout")
    spec = SyncSpec(
        timeout_s=update.timeout_s,
        directory=cluster.shared_dir,
        ranks_per_server=rollout.sizes.tp * rollout.sizes.pp,
        backend=collective_backend(actor, rollout, job.device),
        bucket_mb=update.bucket_mb,
        prefetch_mb=update.prefetch_mb,
        exporters=_on_gpus_of_servers(actor, rollout) if job.device == "cuda" else (),
        full_every=update.full_every,
        source=source,
        adapters=adapters or {},
    )
    if update.checksum:
        pool.checking = partial(compare_checksums, trainer)
    return make_sync(update.transport, trainer, pool, spec)


def _on_gpus_of_servers(actor: EnginePlan, rollout: EnginePlan) -> list[set[int]]:
    """Return for each server the actor's ranks on its GPUs."""
    return [
        {rank for rank, device in enumerate(actor.devices) if device in server.devices} for server in rollout.servers
    ]


def collective_backend(actor: EnginePlan, rollout: EnginePlan, device: str) -> Literal["gloo", "nccl"]:
    """Return nccl between GPUs; gloo on CPU, and if trainer rank 0 shares a GPU with a server, which nccl refuses."""
    return "gloo" if device == "cpu" or actor.devices[0] in rollout.devices else "nccl"
