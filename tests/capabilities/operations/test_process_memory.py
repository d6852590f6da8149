"""Memory of processes: every one has a metric, and only steady growth is reported."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_like.capabilities.operations.memory import MIB, MINUTES, ProcessMemory, growth
from areal_like.capabilities.operations.processes import ProcessSize, resident, resident_of_workers
from areal_like.runtime.descendants import children

NOISE = [random.Random(3).uniform(-20, 20) for _ in range(MINUTES)]
SERIES: dict[str, tuple[Callable[[int], float], bool]] = {
    "leak": (lambda minute: 500 + 10 * minute, True),
    "noisy leak": (lambda minute: 500 + 10 * minute + NOISE[minute], True),
    "leak of a large process": (lambda minute: 20_000 + 100 * minute, True),
    "noise": (lambda minute: 500 + NOISE[minute], False),
    "one step": (lambda minute: 500 + 300 * (minute > 15), False),
    "a cache that fills": (lambda minute: 500 + 400 * (1 - 0.85**minute), False),
    "saw": (lambda minute: 500 + 30 * (minute % 10), False),
    "slow": (lambda minute: 20_000 + 10 * minute, False),
    "shrinking": (lambda minute: 900 - 10 * minute, False),
}


@pytest.mark.parametrize("name", SERIES)
def test_only_steady_growth_is_found(name: str) -> None:
    size, grows = SERIES[name]
    found = growth(deque(int(size(minute) * MIB) for minute in range(MINUTES)))
    assert (found is not None) == grows
    if found is not None:
        assert found / MIB == pytest.approx(size(1) - size(0) - NOISE[1] * 0, rel=0.35) or name == "noisy leak"
    assert growth(deque(int(size(minute) * MIB) for minute in range(MINUTES - 1))) is None


def test_the_process_that_grows_is_named_and_parts_are_added_up() -> None:
    time, gib = [0.0], 1 << 30

    def read() -> list[ProcessSize]:
        grown = int(time[0] / 60 * 20 * MIB)
        return [
            ProcessSize("controller", 1, gib, gib // 2),
            ProcessSize("server-0", 2, gib + grown, gib + grown),
            ProcessSize("server-0", 3, gib, gib),
        ]

    memory = ProcessMemory(read, lambda: time[0])
    for _ in range(6 * MINUTES):
        asyncio.run(memory.look())
        time[0] += 10
        assert memory.metrics()["memory/controller"] == 1.0 and memory.metrics()["memory/server-0"] >= 2.0
    alert = memory.growing()
    assert alert is not None and alert.kind == "memory-growth" and "server-0" in alert.text


def test_processes_of_other_hosts_are_added() -> None:
    async def nodes() -> list[list[ProcessSize]]:
        return [[ProcessSize("actor-0", 7, 1 << 30, 1 << 30)], [ProcessSize("actor-1", 7, 3 << 29, 1 << 30)]]

    memory = ProcessMemory(lambda: [ProcessSize("controller", 7, 1 << 29, 0)], read_nodes=nodes)
    asyncio.run(memory.look())
    assert memory.metrics() == {"memory/actor-0": 1.0, "memory/actor-1": 1.5, "memory/controller": 0.5}


def test_workers_of_a_host_are_named_by_their_logs(tmp_path: Path) -> None:
    """With their descendants, of which each counts once."""
    code = "import subprocess, sys; print(flush=True); subprocess.run(['sleep', '60'])"
    (tmp_path / "logs").mkdir()
    with (tmp_path / "logs/actor-3.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=log)
    try:
        while not (below := children(process.pid)):
            time.sleep(0.05)
        found = resident_of_workers([process.pid, *below])
    finally:
        for pid in (*below, process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    assert [(each.name, each.pid) for each in found] == [("actor-3", pid) for pid in sorted((process.pid, *below))]
    assert resident_of_workers([process.pid]) == []


def test_processes_of_this_host_are_found() -> None:
    code = "import time; kept = bytearray(64 << 20); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = {each.pid: each for each in resident(os.getpid())}
        process.kill()
    assert found[os.getpid()].name == "controller"
    assert found[process.pid].name == "other"
    assert 64 * MIB < found[process.pid].private <= found[process.pid].resident < 256 * MIB
    assert process.pid not in {each.pid for each in resident(os.getpid())}
