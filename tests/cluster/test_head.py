"""The watch over Ray's head and the controller's host: short absences cost nothing, long ones end the run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from limits import HUNG_S

from areal_like.backends.ray import head
from areal_like.backends.ray.head import head_watched
from areal_like.core.errors import ClusterError

CARETAKER = """
import subprocess, sys, threading
from pathlib import Path
from areal_like.backends.ray import head, lifetime
head.LOST_S, head.BEAT_S, lifetime.RETURN_S = 1.0, 0.1, 4.0
lifetime.Caretaker("caretaker-test", Path(sys.argv[1]), [sys.argv[2]])
print(subprocess.Popen(["sleep", "3600"], stdout=subprocess.DEVNULL).pid, flush=True)
threading.Event().wait()
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "LOST_S", 1.0)
    monkeypatch.setattr(head, "BEAT_S", 0.1)


async def listen(port: int = 0) -> asyncio.Server:
    return await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", port)


async def outlive_a_restart(server: asyncio.Server, port: int) -> None:
    """Watch a head that is away for a moment, and then for good."""
    async with asyncio.timeout(HUNG_S), head_watched(f"http://127.0.0.1:{port}"):
        await asyncio.sleep(1.5)
        server.close()
        await asyncio.sleep(0.3)
        server = await listen(port)
        await asyncio.sleep(1.5)
        server.close()
        await asyncio.Event().wait()


@pytest.mark.usefixtures("quick")
def test_a_run_ends_with_the_head_of_ray_and_not_when_it_restarts() -> None:
    async def run() -> None:
        server = await listen()
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ClusterError, match=rf"head at 127\.0\.0\.1:{port} did not answer for 1 s.* same command"):
            await outlive_a_restart(server, port)

    asyncio.run(run())


def test_a_failure_of_the_run_stays_what_it_is() -> None:
    async def run() -> None:
        server = await listen()
        with pytest.raises(KeyError):
            async with head_watched(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"):
                raise KeyError
        server.close()

    asyncio.run(run())


def test_a_node_without_the_head_ends_the_run_there_and_stays_if_the_head_returns(tmp_path: Path) -> None:
    async def run() -> int:
        server = await listen()
        port = server.sockets[0].getsockname()[1]
        command = (sys.executable, "-c", CARETAKER, str(tmp_path / "shared"), f"http://127.0.0.1:{port}")
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caretaker:
            assert caretaker.stdout
            member = psutil.Process(int(caretaker.stdout.readline()))
            server.close()
            deadline = time.monotonic() + HUNG_S
            while member.is_running() and member.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.1)
            server = await listen(port)
            await asyncio.sleep(5)
            assert caretaker.poll() is None
            server.close()
            return caretaker.wait(HUNG_S)

    assert asyncio.run(run()) == 0
