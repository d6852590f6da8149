"""Workers that do not start end the run with the reason; a run without calls ends them at once."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from areal_like.capabilities.agents.workers.processes import UserProcesses
from areal_like.capabilities.agents.workers.remote import CallStart, WorkerLimits
from areal_like.errors import RunError


async def nothing(method: str, question: bytes) -> bytes:
    raise AssertionError("nobody asked")


def test_workers_that_do_not_start_fail_what_waits_for_them(tmp_path):
    log = tmp_path / "logs/workers.log"

    async def main() -> None:
        async with UserProcesses("no_such_module:it", b"", WorkerLimits(1, 1, 60.0), print, log) as processes:
            await processes.call(lambda: CallStart(b"", nothing), 60.0)

    with pytest.raises(
        RunError, match=r"3 workers of the workflow in a row did not start \(exit code 1\); output: .*workers.log"
    ):
        asyncio.run(main())
    assert "No module named 'no_such_module'" in log.read_text()


def test_nothing_is_left_of_processes_that_end_before_they_are_ready():
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    async def main() -> set[int]:
        async with UserProcesses("areal_like.capabilities.agents.playing:player", b"", WorkerLimits(2, 2, 60.0), print):
            return {child.pid for child in psutil.Process().children(recursive=True)} - before

    started = asyncio.run(main())
    assert started and not any(psutil.pid_exists(pid) for pid in started)
