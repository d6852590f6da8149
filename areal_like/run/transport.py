"""The weight transport of a run, and where servers download weights."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from allocation.plan import EnginePlan
from areal_like.backends.ray.interfaces import own_address, own_host
from areal_like.backends.ray.ray_cluster import LOOPBACK
from areal_like.backends.ray.run import RunCluster
from areal_like.backends.transports.deltas.file_server import FileServer
from areal_like.core.config.schema import OWN_FILES, RunConfig
from areal_like.core.rollout.pool import ServerPool
from areal_like.core.trainer.remote import Trainer
from areal_like.core.transfer import FileSource
from areal_like.core.weights import SyncSpec, WeightSync, compare_checksums, make_sync
from areal_like.job import Job


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


@asynccontextmanager
async def make_file_source(cluster: RunCluster, config: RunConfig) -> AsyncIterator[FileSource | None]:
    """Yield where servers download weights, None if they do not (`weight_update.url`)."""
    update, directory = config.weight_update, cluster.shared_dir
    if update.url is None or update.mode != "disk":
        yield None
    elif update.url == OWN_FILES:
        host = LOOPBACK if config.scheduler.type == "local" else _own_host(config.cluster.interface)
        with FileServer(directory, host, cluster.token) as url:
            yield FileSource(url, cluster.token)
    else:
        token = os.environ.get(update.token_variable) if update.token_variable else None
        path = directory.relative_to(Path(config.cluster.fileroot).absolute()).as_posix()
        yield FileSource(f"{update.url.rstrip('/')}/{quote(path)}", token)


def _own_host(interface: str | None) -> str:
    """Return this host's address for the servers of the run. Raises ClusterError."""
    if interface is not None:
        return own_host(interface)
    return own_address("Set cluster.interface to an interface that all nodes have")
