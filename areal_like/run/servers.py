"""Starts the policy's servers where the plan places them, and starts lost ones anew."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from allocation.plan import Device, Plan
from areal_like.backends.ray.run import RunCluster
from areal_like.backends.ray.workers import WorkerGroup
from areal_like.core.events import span
from areal_like.core.rollout.backends import find_backend
from areal_like.core.rollout.pool import ServerPool
from areal_like.core.rollout.server import ServerSpec
from areal_like.core.served_form import served_form
from areal_like.job import Job
from areal_like.run.supervisor import ServerSupervisor


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
