"""A private cluster whose worker hangs: `ray_victims.py WHEN VICTIM FOLDER`; it kills a process of Ray.

VICTIM is a part of its command line; WHEN is `start`, as soon as there is one, or `work`. The error is printed.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import ray_victims  # by this name workers find its class

import allocation
from allocation import Device
from areal_like.backends.ray.run import RunCluster, run_cluster
from areal_like.core.config.schema import SchedulerConfig
from areal_like.core.errors import RunError


class Rank:
    def hang(self) -> None:
        time.sleep(3600)


def find(victim: str) -> list[psutil.Process]:
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if victim in " ".join(each.cmdline())[:200]:
                found.append(each)
    return found


def kill_at_start(victim: str) -> None:
    while not (found := find(victim)):
        time.sleep(0.01)
    found[0].kill()


async def work(cluster: RunCluster, victim: str) -> None:
    ranks = await cluster.start_group("actor", ray_victims.Rank, [(Device(0, 0),)], lambda *_: {}, call_timeout_s=3600)
    working = asyncio.create_task(ranks.call_one(0, "hang", phase="work"))
    await asyncio.sleep(2)
    while not (found := find(victim)):  # an agent takes its name when it is ready
        await asyncio.sleep(0.1)
    found[0].kill()
    await working


async def main(when: str, victim: str, folder: Path) -> None:
    plan = allocation.compile("megatron:d1", cluster=allocation.Cluster(1, 1))
    logs, shared = folder / "logs", folder / "shared"
    if when == "start":
        threading.Thread(target=kill_at_start, args=(victim,), daemon=True).start()
    try:
        async with run_cluster(SchedulerConfig(), plan, uses_gpus=False, log_dir=logs, shared_dir=shared) as cluster:
            await work(cluster, victim)
    except* RunError as errors:
        print(*errors.exceptions, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
