"""A run over several hosts loses one that has a server alone, dead or cut off, and continues with the other servers."""

from __future__ import annotations

import os
import re
import secrets
import shutil
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
from namespaces import Host, hosts, reason_to_skip
from running import ENDLESS, ROOT, Run, writing

from areal_like.checkpoint.journal import Journal, read_header
from areal_like.checkpoint.store import DIRECTORY, JOURNAL

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.long,
    pytest.mark.covers("server restart", "updates: collective", "updates: disk"),
    pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip())),
]
PORT = 6379
# a trainer on one host, and a server on each of two others
LAYOUT = ("actor.backend=megatron:d1", "rollout.backend=sglang:d2", "cluster.n_nodes=3")


@contextmanager
def ray_on(machines: list[Host], env: dict[str, str]) -> Iterator[str]:
    """Start Ray on hosts, one after the other; the first has the head, and no place for processes of a run."""
    for alive, machine in enumerate(machines, 1):
        start_ray(machine, machines[0], alive, env)
    yield f"{machines[0].address}:{PORT}"


def start_ray(machine: Host, head: Host, alive: int, env: dict[str, str]) -> None:
    """Start Ray on a host until `alive` nodes are in the cluster; on a busy machine Ray may give up before."""
    address = f"{head.address}:{PORT}"
    joining = (f"--address={address}", "--num-cpus=1")
    role = ("--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false") if machine is head else joining
    code = f"""import ray, time
ray.init(address="{address}", log_to_driver=False, logging_level="ERROR")
while sum(node["Alive"] for node in ray.nodes()) < {alive}:
    time.sleep(0.5)"""
    ray = waiting = None
    deadline = time.monotonic() + HUNG_S
    while waiting is None or waiting.poll() != 0:
        assert time.monotonic() < deadline, f"Ray does not start on host {machine.address}"
        if ray is None or ray.poll() is not None:
            ray = ray_start(machine, env, *role)
        if waiting is None or waiting.poll() is not None:
            waiting = head.start(sys.executable, "-c", code, env=os.environ | env, stderr=subprocess.DEVNULL)
        time.sleep(0.5)


def ray_start(machine: Host, env: dict[str, str], *role: str) -> subprocess.Popen[Any]:
    ray = shutil.which("ray", path=f"{sys.prefix}/bin")
    assert ray
    options: dict[str, Any] = {"env": os.environ | env, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    common = ("--block", "--disable-usage-stats", "--object-store-memory=100000000")
    return machine.start(ray, "start", f"--node-ip-address={machine.address}", *role, *common, **options)


@contextmanager
def run_on(folder: Path, count: int, *overrides: str) -> Iterator[tuple[Run, list[Host], Callable[[Host], None]]]:
    """Start a run on hosts with Ray, the first without processes of it; yields how to start Ray on a host once more."""
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "PYTHONPATH": str(ROOT)}
    shared = (folder, *(path for path in (ROOT, Path(sys.prefix)) if path.is_relative_to("/tmp")))
    with hosts(count, *shared) as machines, ray_on(machines, env) as address:
        scheduler = ("scheduler.type=ray", f"scheduler.address={address}", "cluster.n_gpus_per_node=1")
        run = Run(folder, *overrides, *scheduler, prefix=machines[0].entering, env=env)
        yield run, machines, lambda machine: start_ray(machine, machines[0], len(machines), env)


def interrupt(run: Run) -> None:
    """Ctrl-C; the run ends and leaves nothing."""
    (controller,) = psutil.Process(run.process.pid).children()
    controller.send_signal(signal.SIGINT)
    assert run.end() == 130, run.errors
    run.wait_for(lambda: not writing(run.directory / "logs"), lives=False)


def host_of(run: Run, log: str, machines: list[Host]) -> Host:
    """The host on which the processes write to a log of the run."""
    (found,) = {machine.number for process in written_by(run, log) for machine in machines if machine.runs(process)}
    return machines[found - 1]


def written_by(run: Run, log: str) -> list[psutil.Process]:
    return writing(run.directory / "logs" / log)


@pytest.mark.parametrize(("how", "transport"), [("kill", "collective"), ("cut", "disk"), ("cut", "collective")])
def test_a_host_with_a_server_alone_is_lost_and_the_run_continues(tmp_path: Path, how: str, transport: str) -> None:
    with run_on(tmp_path, 4, *LAYOUT, *ENDLESS, f"weight_update.mode={transport}") as (run, machines, _):
        run.wait_for_step(2)
        lost, trainer = host_of(run, "rollout-1.log", machines), host_of(run, "actor-0.log", machines)
        assert lost is not trainer
        getattr(lost, how)()
        seen = time.monotonic()
        run.wait_for(lambda: "1 server continues. The failed server is restarted." in run.output)
        print(f"noticed after {time.monotonic() - seen:.1f} s")
        silent = f"host {lost.address} did not answer for 10 s (cluster.host_timeout_s)"
        assert silent in run.output or how == "kill", run.output  # the connections of one that is dead are closed
        run.wait_for(lambda: run.serving()[-2:] == [1.0] * 2)
        print(f"two steps with the other server after {time.monotonic() - seen:.1f} s")
        if how == "cut":
            lost.mend()
            run.wait_for(lambda: run.serving()[-2:] == [2.0] * 2)
        interrupt(run)


# two trainer ranks and a server, each on a host of its own
TRAINER = ("actor.backend=megatron:d2", "rollout.backend=sglang:d1", "cluster.n_nodes=3")
RECOVERS = ("recover.mode=auto", "recover.freq_steps=2")


def resumed(run: Run) -> bool:
    """Whether the run has trained a step after its trainer was restarted."""
    _, found, after = run.output.rpartition("resuming from ")
    return bool(found and re.search(r"^ {1,4}\d+ ", after, re.MULTILINE))


def has_ray(host: Host) -> bool:
    """Whether Ray runs on a host: after a cut that outlasts Ray's patience it ends there."""
    return any("raylet" in process.name() for process in host.processes())


def check_exactly_once(run: Run) -> None:
    """Check that no group of the journal is there twice, and no step is missing."""
    file = run.directory / DIRECTORY / JOURNAL
    steps = Journal(file, read_header(file)["data"]).steps()
    assert [step.version for step in steps] == list(range(1, len(steps) + 1))
    groups = [group for step in steps for group in step.groups]
    assert len(groups) == len(set(groups))


@pytest.mark.parametrize("how", ["kill", "cut", "layout"])
def test_a_host_with_a_trainer_rank_is_lost_and_the_trainer_restarts(tmp_path: Path, how: str) -> None:
    layouts = ("recover.layouts=[megatron:d1]",) if how == "layout" else ()
    spare = how == "kill"
    with run_on(tmp_path, 4 + spare, *TRAINER, *ENDLESS, *RECOVERS, *layouts) as (run, machines, start):
        run.wait_for_step(3)
        lost, servers = host_of(run, "actor-1.log", machines), written_by(run, "server-0.log")
        seen = time.monotonic()
        lost.kill() if how == "kill" else lost.cut()
        run.wait_for(lambda: "The trainer restarts from the last checkpoint" in run.output)
        print(f"noticed after {time.monotonic() - seen:.1f} s")
        if how == "cut":
            run.wait_for(lambda: f"The trainer waits for host {lost.address}" in run.output)
            lost.mend()
            run.wait_for(lambda: resumed(run) or not has_ray(lost))
            if not has_ray(lost):
                start(lost)
        run.wait_for(lambda: resumed(run))
        print(f"trained a step after {time.monotonic() - seen:.1f} s")
        assert ("The trainer continues as megatron[actor]:d1" in run.output) == (how == "layout")
        assert set(servers) <= set(written_by(run, "server-0.log"))
        check_exactly_once(run)
        if how == "layout":
            lost.mend()
        interrupt(run)
