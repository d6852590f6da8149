"""Whatever ends a run, nothing of it stays; the first failure is the one that is told."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from clusters import ExistingCluster, existing_cluster
from limits import HUNG_S

from areal_like.backends.ray import lifetime
from areal_like.backends.ray.janitor import members
from areal_like.backends.ray.lifetime import run_lifetime, spawn
from areal_like.backends.ray.lineage import identity, lives
from areal_like.runtime.ports import listen, reserve_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass
class Job:
    """A run in a process of its own, and what has to be gone after it."""

    process: subprocess.Popen[str]
    log_dir: Path
    facts: dict[str, Any]
    pids: set[int]
    ports: set[int]

    def end(self, *signals: signal.Signals) -> tuple[int, str]:
        """Send the signals a moment apart; exit code and standard error."""
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.5)
        return self.process.wait(600), self.process.stderr.read()  # type: ignore[union-attr]

    def remains(self) -> list[str]:
        """What is left of the run after the time limit; empty as soon as nothing is."""
        deadline = time.monotonic() + HUNG_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def _left(self) -> list[str]:
        run_id, directory = self.facts["run_id"], self.facts["directory"]
        of_nodes = [f"{run_id}-{bundle}" for bundle in range(2)]  # on an existing cluster
        processes = {p.pid: p for each in (run_id, *of_nodes) for p in members(each)}
        processes |= {p.pid: p for p in psutil.process_iter() if p.pid in self.pids}
        files = [directory, f"{directory}-0", self.facts["shared_dir"], *self.facts["server"]["memory"]]
        return [
            *(f"process {p}" for p in processes.values() if lives(identity(p.pid))),
            *(f"port {port}" for port in self.ports & listening().keys()),
            *(f"file {file}" for file in files if os.path.exists(file)),
        ]


def listening() -> dict[int, int | None]:
    """Process of every listening TCP port of this host."""
    return {c.laddr.port: c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def start(how: str, log_dir: Path, *cluster: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """The job in a process group of its own, so that signals meet it alone."""
    return subprocess.Popen(
        [sys.executable, str(HERE / "job.py"), how, *(cluster or ("local", "auto")), str(log_dir)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@contextmanager
def job(how: str, log_dir: Path, *cluster: str, env: dict[str, str] | None = None) -> Iterator[Job]:
    """A job that has said what it is made of."""
    process = start(how, log_dir, *cluster, env=env)
    try:
        line = process.stdout.readline()  # type: ignore[union-attr]
        assert line, process.stderr.read()  # type: ignore[union-attr]
        facts = json.loads(line)
        alive = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        pids = {child.pid for child in alive} | set(facts["pids"]) | {facts["server"]["pid"]}
        ports = {port for port, pid in listening().items() if pid in pids | {process.pid}}
        yield Job(process, log_dir, facts, pids, ports | {facts["server"]["port"]})
    finally:
        process.kill()
        process.communicate()


def test_a_run_that_finishes(tmp_path: Path) -> None:
    with job("finish", tmp_path) as run:
        assert run.end()[0] == 0
        assert run.remains() == []
        assert run.facts["sums"] == [3, 4]
        assert run.facts["server"]["gpus"] == ""
        assert "rank 1 is up" in (tmp_path / "actor-1.log").read_text()
        raised, late, refused = run.facts["failures"]
        assert "actor rank 1 failed during training: ValueError: no luck on 1" in raised
        assert "in raise_on" in raised  # the remote traceback
        assert "no answer from rank 0, 1 within 0.5 s" in late
        assert "the plan asks for 1 node with 2 CPU, 2 GPU" in refused
        assert "the cluster has 1 node with 2 CPU, 0 GPU" in refused


def test_a_rank_that_dies_while_the_other_hangs(tmp_path: Path) -> None:
    with job("crash", tmp_path) as run:
        told = time.monotonic()
        code, errors = run.end()
        assert code == 1
        assert "WorkerError: actor rank 1 failed during training: the process died" in errors
        assert time.monotonic() - told < HUNG_S
        assert run.remains() == []


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        pytest.param((signal.SIGINT, signal.SIGINT), -signal.SIGINT, marks=pytest.mark.long, id="ctrl-c twice"),
        pytest.param((signal.SIGTERM,), 128 + signal.SIGTERM, marks=pytest.mark.long, id="SIGTERM"),
        pytest.param((signal.SIGKILL,), -signal.SIGKILL, marks=pytest.mark.long, id="SIGKILL"),
    ],
)
def test_a_run_that_is_stopped(tmp_path: Path, signals: tuple[signal.Signals, ...], code: int) -> None:
    with job("wait", tmp_path) as run:
        assert len(run.ports) > 3  # the server's and Ray's own
        others = [c.laddr.ip for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid in run.pids]
        assert {address.removeprefix("::ffff:") for address in others} == {"127.0.0.1"}
        assert run.end(*signals)[0] == code
        assert run.remains() == []


@pytest.fixture
def existing() -> Iterator[ExistingCluster]:
    with existing_cluster(1, 2) as cluster:
        yield cluster


@pytest.mark.long
def test_an_existing_cluster(tmp_path: Path, existing: ExistingCluster) -> None:
    address, env = existing.address, existing.env
    stranger = start("wait", tmp_path, "ray", address, env=env | {"RAY_AUTH_TOKEN": "0" * 64})
    assert "its authentication token is not this process's" in stranger.communicate(timeout=600)[1]

    greedy = start("ask", tmp_path, "ray", address, env=env)
    errors = greedy.communicate(timeout=600)[1]
    assert "not granted within 3 s (scheduler.startup_timeout_s)" in errors
    assert "the plan asks for 1 node with 99 CPU, 99 GPU" in errors
    assert "free now: 4 CPU, 2 GPU" in errors

    with job("crash", tmp_path, "ray", address, env=env) as run:
        assert run.facts["gpus"] == ["0", "1"]
        assert run.facts["server"]["gpus"] == "1"  # colocated with rank 1
        assert "actor rank 1 failed during training: the process died" in run.end()[1]
        assert run.remains() == []
    with job("wait", tmp_path, "ray", address, env=env) as run:
        run.end(signal.SIGKILL)
        assert run.remains() == []


def test_no_cluster_at_the_address(tmp_path: Path) -> None:
    errors = start("wait", tmp_path, "ray", "127.0.0.1:1").communicate(timeout=600)[1]
    assert "scheduler.address: nothing answers at 127.0.0.1:1" in errors
    errors = start("wait", tmp_path, "ray", "nowhere").communicate(timeout=600)[1]
    assert "'nowhere' is not `auto` or HOST:PORT" in errors


def test_a_slow_clean_up_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(lifetime, "SLOW_JANITOR_S", 0.001)  # less than a janitor's start takes
    with run_lifetime(secrets.token_hex(6)) as directory:
        (directory / "file").touch()
    assert not directory.exists()
    assert f"the clean-up of {directory} is still busy; waiting for it" in capfd.readouterr().err


def test_a_clean_up_that_hangs_fails_no_run(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(lifetime, "SLOW_JANITOR_S", 0.001)
    monkeypatch.setattr(lifetime, "JANITOR_LIMIT_S", 0.001)
    with run_lifetime(secrets.token_hex(6)) as directory:
        pass
    assert f"the clean-up of {directory} is left to end by itself" in capfd.readouterr().err


FORKS = """
import os, secrets, time
from areal_like.backends.ray.lifetime import run_lifetime
with run_lifetime(secrets.token_hex(6)) as directory:
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # what became the janitor's parent ends once it knows its owner
    if child := os.fork():
        print(child, directory, flush=True)
    time.sleep(1800)
"""


def test_a_killed_owner_that_nobody_reaps_and_whose_child_has_the_pipe() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", FORKS], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    )
    child, directory = owner.stdout.readline().split()  # type: ignore[union-attr]
    owner.kill()  # and stays a zombie until it is waited for
    try:
        deadline = time.monotonic() + HUNG_S
        while os.path.exists(directory) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not os.path.exists(directory)
        assert not lives(identity(int(child)))
    finally:
        owner.communicate()


def test_a_user_s_own_variables_count_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "12345678")
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    with run_lifetime(secrets.token_hex(6)) as directory:
        assert os.environ["TMPDIR"] == str(directory)
        assert os.environ["MALLOC_MMAP_THRESHOLD_"] == "12345678"
        assert "MALLOC_TRIM_THRESHOLD_" in os.environ
    assert "MALLOC_TRIM_THRESHOLD_" not in os.environ


def test_a_program_s_log_is_its_owner_s_alone_to_read(tmp_path):
    log = tmp_path / "logs" / "server.log"
    assert spawn([sys.executable, "-c", "print('secret')"], env={}, log_file=log).wait(300) == 0
    assert log.read_text() == "secret\n"
    assert log.stat().st_mode & 0o077 == 0


def test_a_reserved_port_is_kept_for_the_server_that_asks_for_it():
    with reserve_port("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with listen("127.0.0.1", port), socket.create_connection(("127.0.0.1", port)):
            pass
    with listen("127.0.0.1", port), pytest.raises(OSError, match="in use"):
        reserve_port("127.0.0.1", port)
