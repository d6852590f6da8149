"""Code that blocks, dies, forks or takes all memory harms its own episode alone: all others end well, and more come."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from limits import HUNG_S
from playing import ASK, Pool, score
from scripted import tokenizer

from areal_like.capabilities.agents.make import Workflows
from areal_like.capabilities.agents.playing import ENTRY
from areal_like.capabilities.agents.workers import remote, watch
from areal_like.capabilities.agents.workers.processes import UserProcesses
from areal_like.capabilities.agents.workers.remote import WorkerLimits
from areal_like.capabilities.agents.workers.workers import MOST_FAILURES
from areal_like.core.config.load import load
from areal_like.core.rollout.pool import Sampling
from areal_like.core.types import Prompt

ROOT = Path(__file__).parents[3]
BLOCKED_S, MEMORY_MB = 3.0, 600
REGEX = 're.match(r"(a+)+$", "a" * 45 + "b")'
CLEAN = "env={'PATH': '/usr/bin:/bin'}, start_new_session=True"

HOSTILE = {
    "regex": (f"await asyncio.to_thread(lambda: {REGEX})", "blocked"),
    "regex in the loop": (REGEX, "blocked"),
    "endless loop": ("while True: pass", "blocked"),
    "sleep": ("time.sleep(99999)", "blocked"),
    "stops itself": ("os.kill(os.getpid(), signal.SIGSTOP)", "done"),
    "exits": ("os._exit(0)", "died"),
    "exits in a thread": ("await asyncio.to_thread(os._exit, 3)", "died"),
    "crashes": ("ctypes.string_at(0)", "died"),
    "closes all": ("os.closerange(3, 4096); await asyncio.sleep(99999)", "died"),
    "takes memory": ('kept = [(b"x" * (50 << 20), await asyncio.sleep(0)) for _ in range(200)]', "memory"),
    "takes all memory at once": ("bytearray(10 << 30)", "memory"),
    "child that takes memory": (
        "assert subprocess.run([sys.executable, '-c', 'bytearray(10 << 30)'], stderr=-3).returncode == 1",
        "done",
    ),
    "takes memory in a thread": ('await asyncio.to_thread(lambda: [b"x" * (50 << 20) for _ in range(200)])', "memory"),
    "endless loop in a thread": ("await asyncio.to_thread(spin)", "time_limit"),
    "fork that goes on": ("os.fork() and await_nothing(); await asyncio.sleep(0)", "done"),
    "pool of processes": ("children(ProcessPoolExecutor(2)); await asyncio.sleep(99999)", "time_limit"),
    "clean child": (f"subprocess.Popen(['sleep', '77777'], {CLEAN})", "done"),
}
SOON = (
    "regex",
    "stops itself",
    "exits",
    "takes memory",
    "child that takes memory",
    "endless loop in a thread",
    "clean child",
)
SOURCE = f"""
import ctypes, os, re, signal, subprocess, sys
from concurrent.futures import ProcessPoolExecutor
def spin():
    while True: pass
def await_nothing(): ...
def children(pool):
    for _ in range(2): pool.submit(time.sleep, 77777)
async def run(row, client):
    await {ASK}
    if not row["hostile"]:
        for _ in range(3):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(time.sleep, 0.01)
        return 1.0
    BODY
    return 0.0
"""


@contextmanager
def started(limits: WorkerLimits) -> Iterator[tuple[UserProcesses, list[str]]]:
    """Processes, and what was said about them."""
    said: list[str] = []
    shared = UserProcesses(ENTRY, pickle.dumps([]), limits, said.append)
    asyncio.run(shared.__aenter__())
    yield shared, said
    asyncio.run(shared.__aexit__())


@pytest.fixture(scope="module")
def hardened() -> Iterator[tuple[UserProcesses, list[str]]]:
    """Two processes with small limits, and what was said about them."""
    with started(WorkerLimits(2, 2, BLOCKED_S, MEMORY_MB)) as both:
        yield both


@pytest.fixture
def lonely(play: Any) -> Iterator[tuple[UserProcesses, list[str]]]:
    """One process with one loop, which `play` uses."""
    with started(WorkerLimits(1, 1, BLOCKED_S)) as both:
        play.uses(both[0])
        yield both


@pytest.fixture
def play(write: Callable[..., Path], tmp_path: Path, hardened: Any) -> Callable[..., Any]:
    """Plays one hostile episode beside ordinary ones; gives the rewards of these, and how episodes ended."""

    used = [hardened[0]]

    def play(body: str, *overrides: str, hostile: int = 1, ordinary: int = 100) -> tuple[list[Any], dict[str, float]]:
        (file := tmp_path / f"hostile_{time.monotonic_ns()}.py").write_text(
            "import asyncio, time\n" + SOURCE.replace("BODY", body)
        )
        config, own = (
            load(write(), [f"workflow={file}:run", "episode.max_failed_share=1", *overrides]).config,
            tokenizer("plain"),
        )

        async def main() -> tuple[list[Any], dict[str, float]]:
            async with Workflows(config, Pool(), score, own, print, None, used[-1]) as workflows:  # type: ignore[arg-type]
                workflow = workflows.train(Sampling(8, stop_token_ids=own.eos_token_ids), 1)
                rows = [{"question": "x", "hostile": place < hostile} for place in range(hostile + ordinary)]
                groups = await asyncio.gather(*(workflow(Prompt(i, [7], row=row), i) for i, row in enumerate(rows)))
                counts = {
                    name.removeprefix("episodes/"): n for name, n in workflows.counts().items() if "turns" not in name
                }
                return [item.reward for group in groups[hostile:] for item in group], counts

        return asyncio.run(main())

    play.uses = used.append  # type: ignore[attr-defined]
    return play


@pytest.mark.parametrize("name", [pytest.param(it, marks=[] if it in SOON else [pytest.mark.long]) for it in HOSTILE])
def test_hostile_code_fails_its_own_episode_alone(name, play, hardened):
    body, cause = HOSTILE[name]
    limit = 5 if cause == "time_limit" else 600
    others = 30 if name in SOON else 100
    rewards, counts = play(body, f"episode.timeout_s={limit}", ordinary=others)
    # Whose memory a process has is known by which code ran when it was measured: rarely by another episode's.
    harmed = others - len(rewards) if cause == "memory" else 0
    assert harmed <= 1
    assert rewards == [1.0] * (others - harmed), (counts, hardened[1])
    ended = {"done": others + 1} if cause == "done" else {"done": others - harmed, cause: 1 + harmed}
    assert counts == ended, hardened[1]


def test_time_in_which_another_episode_blocks_the_loop_does_not_count(play):
    """The time limit of all episodes was over while one of them kept their loop."""
    with started(WorkerLimits(1, 1, 6.0)) as (processes, said):
        play.uses(processes)
        rewards, counts = play("while True: pass", "episode.timeout_s=5", ordinary=10)
    assert rewards == [1.0] * 10 and counts == {"done": 10, "blocked": 1}, said


def test_a_thread_that_outlives_its_episode_retires_its_worker(play, lonely, monkeypatch):
    """Nothing can end a thread but its process."""
    monkeypatch.setattr(watch, "LEFT_S", 0.5)
    play("await asyncio.to_thread(spin)", "episode.timeout_s=600", hostile=0, ordinary=1)
    before = lonely[0].pids
    _, counts = play("await asyncio.to_thread(spin)", "episode.timeout_s=2", ordinary=0)
    assert counts == {"time_limit": 1}
    limit = time.monotonic() + HUNG_S
    while psutil.pid_exists(before[0]) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not psutil.pid_exists(before[0])
    assert play("", ordinary=9)[0] == [1.0] * 9


def test_what_episodes_started_ends_with_their_worker(play, lonely):
    """Whatever session and environment it has."""
    play(f"subprocess.Popen(['sleep', '77778'], {CLEAN})", hostile=4, ordinary=0)
    assert len(sleeping("77778")) == 4
    _, counts = play("os._exit(0)", ordinary=0)
    assert counts == {"died": 1}
    limit = time.monotonic() + HUNG_S
    while sleeping("77778") and time.monotonic() < limit:
        time.sleep(0.1)
    assert sleeping("77778") == []


def sleeping(seconds: str) -> list[int]:
    """Living processes `sleep SECONDS`."""
    return [it.pid for it in psutil.process_iter(["cmdline"]) if (it.info["cmdline"] or [])[-1:] == [seconds]]


KILLED = """
import asyncio, os, pickle, signal, sys
from areal_like.capabilities.agents.workers.processes import UserProcesses
from areal_like.capabilities.agents.workers.remote import CallStart, WorkerLimits
from areal_like.core.user_code import Portable
from areal_like.capabilities.agents.playing import ENTRY, Episode, pack_call

async def main():
    async with UserProcesses(ENTRY, pickle.dumps([]), WorkerLimits(1, 1, 60.0), print) as processes:
        call = pack_call(Episode(Portable(sys.argv[1], None), {}, "key", None))
        print(await processes.call(lambda: CallStart(call, None), 60.0))
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_what_episodes_started_ends_with_a_main_process_that_is_killed(tmp_path):
    """It has neither the session nor the environment of the run."""
    source = f"import subprocess\nasync def run(row, client):\n    subprocess.Popen(['sleep', '77779'], {CLEAN})\n"
    (file := tmp_path / "starts.py").write_text(source + "    return 1.0\n")
    command = [sys.executable, "-c", KILLED, f"{file}:run"]
    killed = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert killed.returncode == -signal.SIGKILL
    limit = time.monotonic() + HUNG_S
    while sleeping("77779") and time.monotonic() < limit:
        time.sleep(0.1)
    assert sleeping("77779") == []


def test_a_worker_has_no_descriptor_of_the_main_process(play, lonely, tmp_path):
    """A child that an agent forks would keep the run's lock, and the janitor's pipe, open."""
    with open(tmp_path / "lock", "w") as lock:
        os.set_inheritable(lock.fileno(), True)
        play("assert os.listdir('/proc/self/fd')", ordinary=0)
        (pid,) = lonely[0].pids
        files = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
        assert str(tmp_path / "lock") not in files
        assert os.getpgid(pid) != os.getpgid(0)


# Damage to a worker in which every later episode fails at once; the second text is what these episodes do.
BROKEN = {
    "patched json": ("json.dumps = json.loads = None", "json.dumps({})"),
    "closed stdout": ("sys.stdout.close()", "print('x')"),
    "closed stderr": ("sys.stderr.close()", "print('x', file=sys.stderr)"),
    "no descriptors": ("resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))", "open('/dev/null').close()"),
    "no file size": (
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
        "tempfile.TemporaryFile(buffering=0).write(b'x')",
    ),
    "no memory": ("resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))", "bytearray(64 << 20)"),
    "no processes": ("subprocess.Popen = None", "subprocess.run(['true'])"),
    "patched asyncio": ("asyncio.wait_for = None", "await asyncio.wait_for(asyncio.sleep(0), 1)"),
    "patched time": ("time.time = None", "time.time()"),
    "damaged modules": ("sys.modules['textwrap'] = None", "import textwrap"),
    "removed directory": ("os.chdir(d := tempfile.mkdtemp()); os.rmdir(d)", "os.getcwd()"),
    "recursion limit": ("sys.setrecursionlimit(60)", "recurse(100)"),
    "patched pickle": ("pickle.dumps = pickle.Pickler = None", "pickle.dumps(1)"),
    "patched built-in": ("builtins.sum = None", "sum([1])"),
}
BREAKS = f"""
import builtins, json, os, pickle, resource, signal, subprocess, sys, tempfile, threading
def recurse(n):
    return n and recurse(n - 1)
async def run(row, client):
    await {ASK}
    if row["hostile"]:
        DAMAGE
        return 0.0
    USE
    await asyncio.sleep(0.05)
    return 1.0
"""


@pytest.mark.parametrize(
    "name",
    [pytest.param(it, marks=[] if it in ("closed stdout", "patched asyncio") else [pytest.mark.long]) for it in BROKEN],
)
def test_a_broken_worker_is_replaced_and_costs_its_own_episodes_alone(name, write, tmp_path, monkeypatch):
    """It attracted every episode, because its loops had the fewest."""
    monkeypatch.setattr(remote, "FAILED_S", 0.5)
    damage, use = BROKEN[name]
    (file := tmp_path / "breaks.py").write_text(
        "import asyncio, time\n" + BREAKS.replace("DAMAGE", damage).replace("USE", use)
    )
    config = load(write(), [f"workflow={file}:run", "episode.max_failed_share=1"]).config
    own, episodes = tokenizer("plain"), 600

    async def main(processes: UserProcesses) -> dict[str, float]:
        async with Workflows(config, Pool(), score, own, print, None, processes) as workflows:  # type: ignore[arg-type]
            workflow, few = workflows.train(Sampling(8, stop_token_ids=own.eos_token_ids), 1), asyncio.Semaphore(8)

            async def play(number: int) -> None:
                async with few:
                    await workflow(Prompt(number, [7], row={"question": "x", "hostile": number == 9}), number)

            await asyncio.gather(*map(play, range(episodes)))
            return {k: v for k, v in workflows.counts().items() if k.startswith("episodes/")}

    with started(WorkerLimits(2, 2, 60.0)) as (processes, said):
        counts = asyncio.run(main(processes))
    failed = sum(n for name, n in counts.items() if name != "episodes/done")
    # Of eight in it some are past the damage: each that ends well begins the count of failures in a row anew.
    assert failed <= 2 * 8 + MOST_FAILURES, (counts, said)
    assert failed >= MOST_FAILURES, f"the damage harms no episode: {counts}"
    assert any("episodes of one worker of the workflow all failed" in text for text in said), (counts, said)
