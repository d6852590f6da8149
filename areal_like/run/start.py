"""Starts trainer ranks where the plan places them."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from areal_like.backends.ray.run import RunCluster
from areal_like.backends.training.rank import TrainerRank
from areal_like.core.algorithms.types import Algorithm
from areal_like.core.config.schema import (
    ActorConfig,
    EngineConfig,
    TrainerRole,
)
from areal_like.core.served_form import Convert, served_form
from areal_like.core.trainer.engine import EngineSpec, LoRA
from areal_like.core.trainer.remote import Reference, Trainer
from areal_like.core.weights import make_sender
from areal_like.job import Job


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
