"""A run to test its lifetime: `job.py HOW TYPE ADDRESS LOG_DIR`; prints what it is made of, then ends as told."""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import allocation
from allocation import Device
from areal_like.backends.ray.lifetime import spawn, temporary_directory
from areal_like.backends.ray.placement import place
from areal_like.backends.ray.run import RunCluster, run_cluster
from areal_like.core.config.schema import SchedulerConfig
from areal_like.core.errors import ClusterError, WorkerError
from areal_like.runtime.ports import reserve_port

PLAN = allocation.compile("megatron:d2", cluster=allocation.Cluster(1, 2))
LISTENER = """
import mmap, os, socket, sys, tempfile, time
from multiprocessing import shared_memory
sys.stdout.write("listening")
sys.stdout.flush()
tempfile.NamedTemporaryFile(delete=False).write(b"left behind")
tracked = shared_memory.SharedMemory(sys.argv[2], create=True, size=64)
with open("/dev/shm/" + sys.argv[3], "xb+") as file:
    file.truncate(64)
    untracked = mmap.mmap(file.fileno(), 64)
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
time.sleep(600)
"""


class Trainer:
    """A rank whose collectives hang when a neighbour is gone, and that writes checkpoints until it dies."""

    def __init__(self, rank: int, shared_dir: Path) -> None:
        print("rank", rank, "is up")
        self._rank = rank
        threading.Thread(target=self._write, args=(shared_dir / str(rank),), daemon=True).start()

    def _write(self, directory: Path) -> None:
        for number in itertools.count():
            with suppress(FileNotFoundError):  # removed meanwhile
                directory.mkdir(parents=True, exist_ok=True)
                (directory / str(number)).touch()
            time.sleep(0.01)

    def pid(self) -> int:
        return os.getpid()

    def gpus(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]

    def add(self, left: int, right: int) -> int:
        return left + right + self._rank

    def raise_on(self, rank: int) -> None:
        if self._rank == rank:
            raise ValueError(f"no luck on {rank}")
        time.sleep(3)

    def die_on(self, rank: int) -> None:
        if self._rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)


class Server:
    """Starts a program with a port and a temporary file; listens for its end in a coroutine."""

    def __init__(self, log_file: Path) -> None:
        self._reserved = reserve_port("127.0.0.1")
        self._port = self._reserved.getsockname()[1]
        self._memory = [f"areal-test-{os.getpid()}-{kind}" for kind in ("tracked", "untracked")]
        command = [sys.executable, "-c", LISTENER, str(self._port), *self._memory]
        self._process = spawn(command, env={"X": "1"}, log_file=log_file)

    async def watch(self) -> None:
        await asyncio.sleep(600)

    async def describe(self) -> dict[str, Any]:
        while not os.path.exists(f"/dev/shm/{self._memory[1]}"):
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        return {
            "pid": self._process.pid,
            "port": self._port,
            "memory": [f"/dev/shm/{name}" for name in self._memory],
            "gpus": os.environ["CUDA_VISIBLE_DEVICES"],
        }


async def start(cluster: RunCluster) -> tuple[Any, Any]:
    """Two trainer ranks and a server on the second one's device, as colocated engines are."""
    devices = [Device(0, 0), Device(0, 1)]
    log_file = cluster.log_dir / "listener.log"
    return await asyncio.gather(
        cluster.start_group(
            "actor",
            Trainer,
            [(d,) for d in devices],
            lambda rank, host: {"rank": rank, "shared_dir": cluster.shared_dir},
            call_timeout_s=600,
        ),
        cluster.start_group(
            "rollout",
            Server,
            [devices[1:]],
            lambda rank, host: {"log_file": log_file},
            call_timeout_s=600,
        ),
    )


async def report_failures(trainer: Any) -> list[str]:
    """Each way a call can fail, and how it is told."""
    messages = []
    for method, arguments, timeout in (("raise_on", (1,), 600), ("raise_on", (9,), 0.5)):
        try:
            await trainer.call_all(method, *arguments, phase="training", timeout=timeout)
        except WorkerError as error:
            messages.append(f"{error} {error.remote_traceback}")
    try:
        async with place(PLAN, uses_gpus=True, elastic=False, timeout_s=600):
            pass
    except ClusterError as error:
        messages.append(str(error))
    return messages


async def main() -> None:
    how, kind, address, log_dir = sys.argv[1:]
    scheduler = SchedulerConfig(type=kind, address=address, startup_timeout_s=3 if how == "ask" else 600)  # type: ignore[arg-type]
    plan = allocation.compile("megatron:d99", cluster=allocation.Cluster(1, 99)) if how == "ask" else PLAN
    async with run_cluster(
        scheduler, plan, uses_gpus=kind == "ray", log_dir=Path(log_dir), shared_dir=Path(log_dir, "shared")
    ) as cluster:
        trainer, server = await start(cluster)
        pool = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
        pool.start()
        facts = {
            "run_id": cluster.run_id,
            "directory": str(temporary_directory(cluster.run_id)),
            "shared_dir": str(cluster.shared_dir),
            "pids": [*await trainer.call_all("pid", phase="start-up"), pool.pid],
            "gpus": await trainer.call_all("gpus", phase="start-up"),
            "sums": await trainer.call_all("add", 1, 2, phase="adding"),
            "server": await server.call_one(0, "describe", phase="start-up"),
            "failures": await report_failures(trainer) if how == "finish" else [],
        }
        print(json.dumps(facts), flush=True)
        if how == "crash":
            await trainer.call_all("die_on", 1, phase="training")
        if how == "wait":
            watching = asyncio.create_task(server.call_one(0, "watch", phase="serving"))
            await trainer.call_all("die_on", 9, phase="training")
            await watching
        pool.terminate()


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except (ClusterError, WorkerError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
