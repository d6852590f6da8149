"""However a run ends, nothing that descends from it is left, and nothing that does not is touched."""

from __future__ import annotations

import ast
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from limits import HUNG_S

from areal_like.backends.ray.lifetime import run_lifetime
from areal_like.backends.ray.lineage import identity, lives

HERE = Path(__file__).parent
SLEEP = [sys.executable, "-c", "import time; time.sleep(3600)"]

STARTED = 5  # by a call of hostile_job.start_all
ENDS = [
    ("wait", "controller", signal.SIGKILL),
    ("succeed", "", 0),
    ("fail", "", 0),
    ("wait", "controller", signal.SIGINT),
    ("wait", "controller", signal.SIGTERM),
]
# With a child of the controller's from before the run, or without one
ROWS = [(*end, older) for end, older in zip(ENDS, ("older", "alone", "older", "alone", "older"), strict=True)]
MORE_ROWS = [(*end, "alone" if older == "older" else "older") for *end, older in ROWS]
OF_RAY = [*ENDS, *(("wait", victim, signal.SIGKILL) for victim in ("raylet", "gcs_server"))]


@pytest.mark.parametrize(
    ("how", "ended", "number", "older"),
    [*ROWS[:2], ROWS[3], *(pytest.param(*row, marks=pytest.mark.long) for row in (ROWS[2], ROWS[4], *MORE_ROWS))],
)
def test_nothing_survives(tmp_path: Path, how: str, ended: str, number: int, older: str) -> None:
    check("plain", tmp_path, how, ended, number, older)


@pytest.mark.long
@pytest.mark.parametrize(("how", "ended", "number"), OF_RAY)
def test_nothing_of_ray_survives(tmp_path: Path, how: str, ended: str, number: int) -> None:
    check("ray", tmp_path, how, ended, number, "alone")


WORKER = """
import os, sys
from areal_like.backends.ray.lifetime import end_with_run, join_run
from hostile_job import hang
join_run(sys.argv[1])
end_with_run(sys.argv[1])
hang(sys.argv[2])
"""


def test_what_a_killed_worker_started_ends_while_the_run_goes_on(tmp_path: Path) -> None:
    """Its children may hold a GPU that the next worker needs; another worker's children stay."""
    run_id = secrets.token_hex(6)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])
    }  # Ray's workers have no TMPDIR yet
    with run_lifetime(run_id, adopts=False):
        other, of_other = begin(run_id, tmp_path / "other", environment)
        for seconds in (5, 20, 80):  # the janitor has to see the children first, and looks less often on a busy machine
            killed, of_killed = begin(run_id, tmp_path / f"killed-{seconds}", environment)
            time.sleep(seconds)
            killed.kill()
            killed.wait()
            if end_within(of_killed, 30 + 2 * seconds):
                break
            for pid, _ in filter(lives, of_killed):
                os.kill(pid, signal.SIGKILL)
        else:
            pytest.fail("children of a killed worker went on")
        assert all(map(lives, of_other)) and other.poll() is None
    other.wait(HUNG_S)
    assert not any(map(lives, of_other))


def begin(
    run_id: str, folder: Path, environment: dict[str, str]
) -> tuple[subprocess.Popen[bytes], list[tuple[int, int]]]:
    """Start a worker of a run; return it and its children."""
    folder.mkdir()
    worker = subprocess.Popen([sys.executable, "-c", WORKER, run_id, str(folder)], env=environment)
    return worker, started(folder, STARTED)


def end_within(processes: list[tuple[int, int]], seconds: float) -> bool:
    """Wait until the processes have ended; return whether they did."""
    limit = time.monotonic() + seconds
    while left := any(map(lives, processes)):
        if time.monotonic() > limit:
            break
        time.sleep(0.1)
    return not left


def started(folder: Path, count: int) -> list[tuple[int, int]]:
    """The processes in a folder, once there are so many."""
    limit = time.monotonic() + HUNG_S
    while len(names := list(folder.iterdir())) < count and time.monotonic() < limit:
        time.sleep(0.1)
    assert len(names) == count
    return [(int(pid), int(start)) for pid, start in (file.name.split(".") for file in names)]


def check(kind: str, tmp_path: Path, how: str, ended: str, number: int, with_older: str) -> None:
    """End a run of hostile processes, and look for them."""
    (folder := tmp_path / "started").mkdir()
    bystander = subprocess.Popen(SLEEP, start_new_session=True)
    owner = subprocess.Popen(
        [sys.executable, str(HERE / "hostile_job.py"), kind, how, with_older, str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "errors").open("w"),
        text=True,
        start_new_session=True,
    )
    older = None
    try:
        if pid := int(owner.stdout.readline()):  # type: ignore[union-attr]
            older = identity(pid)
        line = owner.stdout.readline()  # type: ignore[union-attr]
        assert line, (tmp_path / "errors").read_text()
        victims = ast.literal_eval(line) | {"controller": owner.pid}
        hostile = [(int(pid), int(start)) for pid, start in (file.name.split(".") for file in folder.iterdir())]
        assert len(hostile) >= (15 if kind == "ray" else 9)
        if number:
            os.kill(victims[ended], number)
        owner.wait(HUNG_S)
        end = time.monotonic()
        while (left := [each for each in hostile if lives(each)]) and time.monotonic() - end < HUNG_S:
            time.sleep(0.1)
        print(
            f"{kind} {how} {ended} {number}: after {time.monotonic() - end:.1f} s {len(left)} of {len(hostile)} are left"
        )
        assert left == []
        assert bystander.poll() is None
        assert older is None or lives(older)  # a child of the controller's that is older than the run
    finally:
        owner.kill()
        owner.wait()
        bystander.kill()
        bystander.wait()
        if older:
            os.kill(older[0], signal.SIGKILL)
