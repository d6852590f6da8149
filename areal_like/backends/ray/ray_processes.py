"""The processes of a private Ray cluster: a run ends with any of them, which Ray itself may notice a minute later."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from operator import itemgetter
from pathlib import Path

from areal_like.backends.ray.lineage import Identity, identity, lives
from areal_like.core.errors import ClusterError
from areal_like.runtime.descendants import children

LOOK_S = 0.25
SEARCHES = 1200  # first looks, at which the processes are searched: they start one after the other
# A part of each command line. Raylet ends soon after its agents, which change theirs when they are ready.
_SERVICES = {"gcs/gcs_server": "gcs_server", "raylet/raylet": "raylet"}
_AGENTS = {
    "dashboard/agent.py": "dashboard_agent",
    "ray::DashboardAgent": "dashboard_agent",
    "runtime_env/agent/main.py": "runtime_env_agent",
    "ray::RuntimeEnvAgent": "runtime_env_agent",
}


@asynccontextmanager
async def ray_processes_watched(keep_logs: Callable[[], Path | None]) -> AsyncIterator[None]:
    """Raise ClusterError, which names the logs that `keep_logs` returns, if a process of Ray ends in the body."""
    watched = dict[str, Identity]()
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(_watch(watched, keep_logs))
            yield
            watching.cancel()
    except BaseExceptionGroup as group:
        # errors of ranks follow from the death of Ray's process, and may come first
        lost = await _find_death(watched, keep_logs)
        if lost is None and len(group.exceptions) > 1:
            raise
        raise lost or group.exceptions[0] from (group if lost else group.exceptions[0].__cause__)


def _find_ray_processes() -> dict[str, Identity]:
    """Return the processes that this process's private cluster consists of, by name, as far as they have started.

    A Ray that user code has started is not among them.
    """
    found = _find_children(os.getpid(), _SERVICES)
    return found | (_find_children(found["raylet"][0], _AGENTS) if "raylet" in found else {})


def _find_children(parent: int, names: Mapping[str, str]) -> dict[str, Identity]:
    """Return the oldest child of each name: a process that raylet forks has its name at first, and may end soon."""
    found: dict[str, Identity] = {}
    for process in sorted(map(identity, children(parent)), key=itemgetter(1)):
        with suppress(OSError):  # ended meanwhile
            command = Path(f"/proc/{process[0]}/cmdline").read_bytes().decode(errors="replace").split("\0--", 1)[0]
            for name in [name for part, name in names.items() if part in command]:
                found.setdefault(name, process)
    return found


async def _watch(watched: dict[str, Identity], keep_logs: Callable[[], Path | None]) -> None:
    for look in itertools.count():
        if look < SEARCHES:
            watched |= _find_ray_processes() | watched
        await asyncio.sleep(LOOK_S)
        if (lost := await _find_death(watched, keep_logs)) is not None:
            raise lost


async def _find_death(watched: Mapping[str, Identity], keep_logs: Callable[[], Path | None]) -> ClusterError | None:
    ended = [name for name, process in watched.items() if not lives(process)]
    if not ended:
        return None
    logs = await asyncio.to_thread(keep_logs)
    where = f"\n  its output: {logs}" if logs else ""
    return ClusterError(
        f"{ended[0]}, a process of the private Ray cluster, has ended. It was killed, by the system if memory was short "
        "(`dmesg` names what the system killed), or it failed. The run ends with it. Start it again: with "
        f"recover.mode=auto it resumes from the last checkpoint{where}"
    )
