"""Whatever a call does, it ends alone, leaves nothing behind and harms nobody's processes."""

import asyncio
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import hostile_rewards
import psutil
import pytest
from limits import HUNG_S

from areal_like.rewards import worker
from areal_like.rewards.pool import Cause, Failure, RewardPool


def call(pool: RewardPool, name: str, argument: str = ""):
    return pool.call(functools.partial(worker.itself, getattr(hostile_rewards, name)), argument)


def in_pool(*calls: tuple[str, str], timeout_s: float = 600, **settings) -> list:
    """Outcomes of calls, side by side."""

    async def main():
        async with RewardPool(timeout_s=timeout_s, **settings) as pool:
            return await asyncio.gather(*(call(pool, name, argument) for name, argument in calls))

    return asyncio.run(main())


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it may end between two calls
        return False


def wait_until(true, limit_s: float = HUNG_S) -> bool:
    deadline = time.monotonic() + limit_s
    while not (done := true()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return done


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("exit_at_once", Cause.DIED),
        ("kill_itself", Cause.DIED),
        ("close_everything", Cause.DIED),
        ("catastrophic_regex", Cause.TIMED_OUT),
        ("busy_in_c", Cause.TIMED_OUT),
    ],
)
def test_a_hostile_call_fails_alone(name, cause):
    good = [("good", str(number)) for number in range(10)]
    outcomes = in_pool(*good, (name, ""), *good, workers=2, timeout_s=600 if cause is Cause.DIED else 2)
    assert outcomes[10].cause is cause
    assert outcomes[:10] == outcomes[11:] == [str(number) for number in range(10)]


def test_a_worker_that_was_stopped_is_replaced(monkeypatch):
    monkeypatch.setattr("areal_like.rewards.pool.IMPORT_LIMIT_S", 0.5)
    monkeypatch.setattr("areal_like.rewards.pool._SPARE_S", 0.5)
    stopped, good = in_pool(("stop_itself", ""), ("good", "a"), workers=1, timeout_s=0.5)
    assert stopped == Failure(Cause.TIMED_OUT, "it took more than 0.5 s") and good == "a"


@pytest.mark.parametrize("name", ["allocate", "allocate_in_a_child"])
def test_a_call_that_takes_too_much_memory_is_ended(name):
    ended, good = in_pool((name, ""), ("good", "a"), workers=1, memory_mb=300)
    assert ended.cause is Cause.DIED and "reward.memory_mb allows 300" in ended.message
    assert good == "a"


def test_a_worker_that_keeps_memory_is_replaced_between_two_calls():
    pids = in_pool(*[("leak", "")] * 12, workers=1, memory_mb=400)
    assert all(isinstance(pid, int) for pid in pids)  # no reward is lost
    assert 1 < len(set(pids)) < 12


def test_a_worker_is_replaced_after_many_calls(monkeypatch):
    monkeypatch.setattr("areal_like.rewards.pool._CALLS", 3)
    pids = in_pool(*[("worker_pid", "")] * 7, workers=1)
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_fork_server_that_ends_or_stops_is_replaced(number, monkeypatch):
    monkeypatch.setattr("areal_like.rewards.processes.START_S", 8.0 if number == signal.SIGSTOP else HUNG_S)
    monkeypatch.setattr("areal_like.rewards.processes.STOP_S", 0.5 if number == signal.SIGSTOP else HUNG_S)

    async def main():
        async with RewardPool(timeout_s=600, workers=2) as pool:
            server = await call(pool, "server_pid")
            os.kill(server, number)
            waiting = [call(pool, "good", "a") for _ in range(20)]
            killed = [call(pool, "kill_itself") for _ in range(2)]
            outcomes = await asyncio.gather(*waiting, *killed)
            later = await asyncio.gather(*(call(pool, "good", "b") for _ in range(10)))
            return outcomes, later

    outcomes, later = asyncio.run(main())
    assert later == ["b"] * 10
    assert sum(isinstance(outcome, Failure) for outcome in outcomes) <= 4  # two that kill, and one of each worker


@pytest.mark.parametrize(("name", "limit_s"), [("daemon", 600), ("daemon_then_killed", 600), ("daemon_then_hangs", 3)])
def test_what_a_call_has_started_ends_with_it_whatever_it_made_of_itself(tmp_path, name, limit_s):
    pids = tmp_path / "pids"

    async def main():
        async with RewardPool(timeout_s=limit_s, workers=1) as pool:
            assert await call(pool, "good", "a") == "a"
            await call(pool, name, str(pids))
            started = int(pids.read_text())
            assert await asyncio.to_thread(wait_until, lambda: not lives(started), 10)  # while the pool lives
            assert await call(pool, "good", "b") == "b"

    asyncio.run(main())


OWNER = """
import asyncio, os, sys
import hostile_rewards
from areal_like.rewards import worker
from areal_like.rewards.pool import RewardPool
import functools

async def main():
    async with RewardPool(timeout_s=3600, workers=1) as pool:
        load = functools.partial(worker.itself, hostile_rewards.daemon_then_hangs)
        await pool.call(load, sys.argv[1])

asyncio.run(main())
"""


def test_what_a_call_has_started_ends_with_a_killed_main_process(tmp_path):
    pids = tmp_path / "pids"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(pids)], env=environment)
    assert wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"))
    owner.kill()
    owner.wait()
    assert wait_until(lambda: not lives(int(pids.read_text())), 10)


def test_no_process_of_somebody_else_is_signalled(monkeypatch):
    """Also none that has, by now, the process id or the group of a worker that ended long ago."""
    killed = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    monkeypatch.setattr(os, "killpg", lambda group, number: killed.append(group))
    in_pool(("kill_itself", ""), ("good", "a"), ("exit_at_once", ""), workers=1)
    assert killed == []  # the fork server alone kills workers, which are its children as long as it knows them
