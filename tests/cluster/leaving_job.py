"""A run whose worker leaves shared memory of every kind: `leaving_job.py END FOLDER`.

The names are in a file of FOLDER. The worker ends as END says, and the controller waits until its input is closed.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import multiprocessing
import os
import pickle
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

SEEN_S = 0.5  # between the creation of memory without a tracker and the end of its process
KEPT: list[Any] = []


def tracked() -> str:
    """Memory of the standard library, which a process of its own removes."""
    KEPT.append(memory := shared_memory.SharedMemory(create=True, size=64))
    return f"/dev/shm/{memory.name}"


def semaphore() -> str:
    """A semaphore for processes that are spawned."""
    KEPT.append(made := multiprocessing.get_context("spawn").Semaphore())
    return f"/dev/shm/sem.{made._semlock.name.lstrip('/')}"


def tensor() -> str:
    """A tensor that is shared by name."""
    import torch

    torch.multiprocessing.set_sharing_strategy("file_system")
    KEPT.append(made := torch.zeros(64).share_memory_())
    return f"/dev/shm/{made.untyped_storage()._share_filename_cpu_()[1].decode().lstrip('/')}"


def untracked(name: str = "") -> str:
    """Memory of a library that removes it only at an orderly end."""
    path = name or f"/dev/shm/left-{secrets.token_hex(6)}"
    with open(path, "xb+") as file:
        file.write(bytes(64))
        file.flush()
        KEPT.append(mmap.mmap(file.fileno(), 64))
    return path


def of_a_program() -> str:
    """Memory of a program that the worker started, which has another environment."""
    path = f"/dev/shm/left-{secrets.token_hex(6)}"
    code = "import sys, time, leaving_job; leaving_job.untracked(sys.argv[1]); print(flush=True); time.sleep(3600)"
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    program = subprocess.Popen([sys.executable, "-c", code, path], env=environment, stdout=subprocess.PIPE)
    assert program.stdout and program.stdout.readline()
    return path


def system_v() -> str:
    """A segment of System V, as PostgreSQL makes one."""
    number = ctypes.CDLL(None).shmget(0, 4096, 0o1600)  # IPC_PRIVATE; IPC_CREAT and the mode
    assert number >= 0
    return f"System V {number}"


KINDS: tuple[Callable[[], str], ...] = (tracked, semaphore, tensor, untracked, of_a_program, system_v)
ENDS: dict[str, Callable[[], object]] = {
    "exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: ctypes.string_at(0),
}


def player(_: bytes) -> Any:
    async def handle(body: bytes, *_: object) -> bytes:
        end, folder = pickle.loads(body)  # noqa: S301  # of this program
        names = [kind() for kind in KINDS]
        (folder / "part").write_text("\n".join(names))
        await asyncio.sleep(SEEN_S)
        (folder / "part").rename(folder / f"names-{secrets.token_hex(4)}")
        await asyncio.sleep(SEEN_S)
        if end in ENDS:
            ENDS[end]()
        await asyncio.sleep(3600)
        raise AssertionError

    return handle


async def main(end: str, folder: Path) -> None:
    from areal_like.capabilities.agents.workers.processes import UserProcesses
    from areal_like.capabilities.agents.workers.remote import CallStart, EndedWorker, WorkerLimits
    from areal_like.cluster.lifetime import run_lifetime

    async def nothing(method: str, question: bytes) -> bytes:
        raise AssertionError

    request = pickle.dumps((end, folder))
    with run_lifetime(secrets.token_hex(6)):
        async with UserProcesses(
            "leaving_job:player", b"", WorkerLimits(1, 1, 60.0), print, folder / "log"
        ) as processes:
            call = asyncio.ensure_future(processes.call(lambda: CallStart(request, nothing), 600.0))
            try:
                await asyncio.wait(
                    [call, asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))], return_when="FIRST_COMPLETED"
                )
                if call.done():
                    assert isinstance(call.exception(), EndedWorker)
                    (folder / "ended").touch()
                    await asyncio.to_thread(sys.stdin.read)
            finally:
                call.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
