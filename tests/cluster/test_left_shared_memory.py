"""Shared memory of a workflow's worker goes with the worker, also while the run goes on and when the run is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import leaving_job
import pytest
from limits import HUNG_S

HERE = Path(__file__).parent


@contextmanager
def job(end: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Start a run; yield it and the names of what its worker made, once all of it is there."""
    owner = subprocess.Popen(
        [sys.executable, str(HERE / "leaving_job.py"), end, str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(lambda: list(folder.glob("names-*")) or owner.poll() is not None)
        (names,) = folder.glob("names-*")
        yield owner, names.read_text().splitlines()
    finally:
        owner.kill()
        owner.wait()


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + HUNG_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def left(names: list[str]) -> list[str]:
    """Return the names that still exist, at most some seconds later."""
    deadline = time.monotonic() + HUNG_S / 4
    while (found := list(filter(exists, names))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def exists(name: str) -> bool:
    if name.startswith("System V"):
        rows = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
        return name.split()[-1] in [row.split()[1] for row in rows]
    return Path(name).exists()


@pytest.mark.parametrize("end", ["kill", *(pytest.param(end, marks=pytest.mark.long) for end in ("exit", "crash"))])
def test_nothing_is_left_of_a_worker_that_ended_early(tmp_path: Path, end: str) -> None:
    other = leaving_job.untracked()  # another run's
    try:
        with job(end, tmp_path) as (owner, names):
            assert len(names) == len(leaving_job.KINDS)
            wait_for(lambda: (tmp_path / "ended").exists())
            assert left(names) == []
            assert owner.poll() is None  # the run goes on
        assert exists(other)
    finally:
        Path(other).unlink()


def test_nothing_is_left_of_a_worker_at_the_end_of_a_run(tmp_path: Path) -> None:
    with job("wait", tmp_path) as (owner, names):
        assert all(map(exists, names))
        assert owner.stdin
        owner.stdin.close()
        owner.wait(HUNG_S)
        assert left(names) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_nothing_is_left_of_a_worker_of_a_killed_run(tmp_path: Path, number: signal.Signals) -> None:
    with job("wait", tmp_path) as (owner, names):
        owner.send_signal(number)
        owner.wait(HUNG_S)
        assert left(names) == []
