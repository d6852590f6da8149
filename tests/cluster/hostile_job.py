"""A run of processes that want to outlive it: `hostile_job.py KIND HOW OLDER FOLDER`; it ends as told, or waits for it.

Controller, reward worker and, with KIND `ray`, a Ray worker start processes that wait; each of these puts its process
id and its start into a file of FOLDER. With OLDER `older` the controller has a child from before the run.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hostile_job  # by this name workers find it
import psutil
from lingering import wait

import allocation
from allocation import Device
from areal_like.backends.ray.lifetime import run_lifetime
from areal_like.backends.ray.run import run_cluster
from areal_like.core.config.schema import SchedulerConfig
from areal_like.rewards import worker
from areal_like.rewards.pool import RewardPool

WAIT = f"""
import os, sys, time
sys.path[:] = {sys.path!r}
from lingering import wait
wait(sys.argv[1])
"""


def start_all(folder: str, daemon: bool = True) -> None:
    """Start a process in a session of its own, one with a clean environment, a daemon with both, and two forks."""
    command = [sys.executable, "-c", WAIT, folder]
    subprocess.Popen(command, start_new_session=True)
    subprocess.Popen(command, env={"PATH": "/usr/bin:/bin"})
    if daemon and os.fork() == 0:
        os.setsid()
        subprocess.Popen(command, env={}, start_new_session=True)
        os._exit(0)
    if os.fork() == 0:
        wait(folder)
    multiprocessing.get_context("fork").Process(target=wait, args=(folder,)).start()


STARTED = 5


def hang(folder: str) -> None:
    start_all(folder)
    time.sleep(3600)


class Rank:
    def start(self, folder: str) -> int:
        start_all(folder)
        return os.getpid()

    def hang(self) -> None:
        time.sleep(3600)


async def with_ray(how: str, folder: str, older: bool) -> None:
    log_dir = Path(folder).with_name("logs")
    async with run_cluster(
        SchedulerConfig(type="local"),
        allocation.compile("megatron:d1", cluster=allocation.Cluster(1, 1)),
        uses_gpus=False,
        log_dir=log_dir,
        shared_dir=log_dir / "shared",
    ) as cluster:
        ranks: Any = await cluster.start_group(
            "actor", Rank, [(Device(0, 0),)], lambda rank, host: {}, call_timeout_s=3600
        )
        rank = await ranks.call_one(0, "start", folder, phase="start-up")
        await work(
            how,
            folder,
            older,
            3 * STARTED,
            asyncio.create_task(ranks.call_one(0, "hang", phase="work")),
            {"rank": rank},
        )


async def work(
    how: str, folder: str, older: bool, started: int, working: asyncio.Task[Any], pids: dict[str, int]
) -> None:
    async with RewardPool(timeout_s=3600, workers=1) as pool:
        judging = asyncio.create_task(pool.call(functools.partial(worker.itself, hostile_job.hang), folder))
        start_all(folder, daemon=not older)  # docs/failures.md names the daemon of a process that had children before
        while len(list(Path(folder).iterdir())) < started:
            assert not judging.done(), judging.result()
            await asyncio.sleep(0.1)
        named = {process.name(): process.pid for process in psutil.Process().children(recursive=True)}
        pids |= {name: named[name] for name in ("raylet", "gcs_server") if name in named}
        print(pids, flush=True)
        if how == "fail":
            raise ValueError("it fails")
        if how == "wait":
            await asyncio.wait([judging, working], return_when="FIRST_COMPLETED")


async def without_ray(how: str, folder: str, older: bool) -> None:
    with run_lifetime(secrets.token_hex(6)):
        await work(how, folder, older, 2 * STARTED - older, asyncio.create_task(asyncio.sleep(3600)), {})


def main() -> None:
    kind, how, older, folder = sys.argv[1:]
    before = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]).pid if older == "older" else 0
    print(before, flush=True)
    asyncio.run((with_ray if kind == "ray" else without_ray)(how, folder, older == "older"))


if __name__ == "__main__":
    main()
