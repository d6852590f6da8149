"""Starts a run's cluster with a Ray that never answers: `hanging_start.py DIRECTORY LIMIT_S`."""

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import ray

import allocation
from areal_like.backends.ray import ray_cluster
from areal_like.backends.ray.run import run_cluster
from areal_like.core.config.schema import SchedulerConfig
from areal_like.core.errors import ClusterError


def hang(*_: Any, _temp_dir: str, **__: Any) -> None:
    """Write a log as Ray does, then wait for ever."""
    logs = Path(_temp_dir, "session_2026", "logs")
    logs.mkdir(parents=True)
    (logs / "gcs_server.out").write_text("the reason\n")
    print("hangs", flush=True)
    threading.Event().wait()


async def start(directory: Path, limit_s: float) -> None:
    """Start, and report a failure."""
    plan = allocation.compile("sglang:d1|megatron:d1")
    scheduler = SchedulerConfig(startup_timeout_s=limit_s)
    logs, shared = directory / "logs", directory / "shared"
    try:
        async with run_cluster(scheduler, plan, uses_gpus=False, log_dir=logs, shared_dir=shared):
            print("started", flush=True)
    except ClusterError as error:
        print(error, flush=True)


if __name__ == "__main__":
    ray.init = hang
    ray_cluster._configure = lambda settings: None
    asyncio.run(start(Path(sys.argv[1]), float(sys.argv[2])))
