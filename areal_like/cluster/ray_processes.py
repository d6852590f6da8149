"""The processes of a private Ray cluster: a run ends with any of them, which Ray itself may notice a minute later."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from areal_like.cluster.lineage import Identity, identity, lives
from areal_like.errors import ClusterError

LOOK_S = 0.25
SEARCHES = (0, 4, 16, 64)  # looks at which the processes are searched: raylet starts its agents late
# Raylet ends soon after its agents. A part of each command line, which an agent changes when it is ready.
_NAMES = {
    "gcs/gcs_server": "gcs_server",
    "raylet/raylet": "raylet",
    "dashboard/agent.py": "dashboard_agent",
    "ray::DashboardAgent": "dashboard_agent",
    "runtime_env/agent/main.py": "runtime_env_agent",
    "ray::RuntimeEnvAgent": "runtime_env_agent",
}


@asynccontextmanager
async def ray_processes_watched(keep_logs: Callable[[], Path | None]) -> AsyncIterator[None]:
    """Raise ClusterError, which names the logs that `keep_logs` returns, if a process of Ray ends in the body."""
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(_watch(keep_logs))
            yield
            watching.cancel()
    except BaseExceptionGroup as group:
        # the ranks' own errors follow from the death of Ray's process
        own, _ = group.split(ClusterError)
        error = own or group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if own is None and len(group.exceptions) > 1:
            raise
        raise error from error.__cause__


def find_ray_processes() -> dict[Identity, str]:
    """Return the names of the processes that this process's private cluster consists of."""
    found = {}
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:  # ended meanwhile
            continue
        if name := _name(command):
            found[identity(process.pid)] = name
    return found


def _name(command: str) -> str | None:
    start = command.split(" --", 1)[0]  # raylet's own options name its agents
    return next((name for part, name in _NAMES.items() if part in start), None)


async def _watch(keep_logs: Callable[[], Path | None]) -> None:
    watched = dict[Identity, str]()
    for look in itertools.count():
        if look in SEARCHES:
            watched = find_ray_processes() | watched
        await asyncio.sleep(LOOK_S)
        if ended := [name for process, name in watched.items() if not lives(process)]:
            logs = await asyncio.to_thread(keep_logs)
            where = f"\n  its output: {logs}" if logs else ""
            raise ClusterError(
                f"{ended[0]}, a process of the private Ray cluster, has ended. It was killed, by the system if memory was "
                f"short (`dmesg` names what the system killed), or it failed. The run ends with it. Start it again: with "
                f"recover.mode=auto it resumes from the last checkpoint{where}"
            )
