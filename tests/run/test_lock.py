"""Who has a run's directory, and how long the same command waits for it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from limits import HUNG_S

from areal_like.backends.ray import janitor
from areal_like.core.errors import DirectoryTaken
from areal_like.metrics.console import View
from areal_like.run import directory as locks
from areal_like.run.directory import _take
from areal_like.runtime.owner import Ownership

ROOT = Path(__file__).parents[2]
HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


def held_by(file: Path, seconds: float, *more: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(file), str(seconds), *more], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"  # type: ignore[union-attr]
    return process


def take(file: Path) -> Ownership:
    return asyncio.run(_take(file.parent, View(False)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "recover").mkdir()
    return tmp_path / "recover/lock"


def test_who_holds_it_is_named_with_what_to_do(file: Path) -> None:
    holder = held_by(file, HUNG_S)
    start = time.monotonic()
    try:
        with pytest.raises(DirectoryTaken) as raised:
            take(file)
        assert time.monotonic() - start < locks.CLEAN_UP_S  # there is no clean-up to wait for
        assert f"{file.parents[1]} belongs to a run that has not ended" in str(raised.value)
        assert f"process {holder.pid} (`{sys.executable} -c" in str(raised.value)
        assert f"started {time.strftime('%Y-')}" in str(raised.value)
        assert f"End it with `kill {holder.pid}`" in str(raised.value)
        os.kill(holder.pid, signal.SIGTERM)  # as the message says
        holder.wait()
        take(file).release()
    finally:
        holder.kill()
        holder.communicate()


def test_a_clean_up_is_waited_for(file: Path) -> None:
    holder = held_by(file, 4, janitor.__name__)  # longer than for what is not of a run
    take(file).release()
    assert holder.wait(HUNG_S) == 0
    holder.communicate()


def test_a_fork_of_the_run_holds_no_lock(file: Path) -> None:
    owner = take(file)
    with locks.kept_from_forks(owner.lock):
        child = os.fork()
        if not child:
            time.sleep(HUNG_S)
            os._exit(0)
    try:
        owner.release()
        take(file).release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
