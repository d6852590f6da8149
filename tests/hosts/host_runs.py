"""Runs over hosts made of namespaces: Ray on them, the run, its processes and its journal."""

from __future__ import annotations

import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from limits import HUNG_S
from namespaces import Host, hosts
from running import ROOT, Run, writing

from areal_like.core.checkpoint.journal import Journal, read_header
from areal_like.core.checkpoint.store import DIRECTORY, JOURNAL

PORT = 6379
STEADY_S = 5.0  # after which a raylet counts as started


@dataclass(frozen=True)
class Cluster:
    """Hosts with Ray, the first of which has the head; `folder` is shared."""

    machines: list[Host]
    env: dict[str, str]
    folder: Path

    def run(self, *overrides: str, on: int = 0, trial: str = "run", output: str = "") -> Run:
        """Start a run whose controller is on a host; `output` begins the names of its files of output."""
        address = f"scheduler.address={self.machines[0].netloc}:{PORT}"
        scheduler = ("scheduler.type=ray", address, "cluster.n_gpus_per_node=1", f"trial_name={trial}")
        prefix = self.machines[on].entering
        run = Run(self.folder, *overrides, *scheduler, prefix=prefix, env=self.env, output=output)
        run.directory = run.directory.with_name(trial)
        return run

    def start_ray(self, machine: Host) -> None:
        """Start Ray on a host once more. The cluster may still count the node that was there before."""
        deadline, ray, since = time.monotonic() + HUNG_S, None, math.inf
        while time.monotonic() - since < STEADY_S:
            assert time.monotonic() < deadline, f"Ray does not start on host {machine.address}"
            if ray is None or ray.poll() is not None:
                ray = ray_start(machine, self.env, f"--address={self.machines[0].netloc}:{PORT}", "--num-cpus=1")
            since = min(since, time.monotonic()) if has_ray(machine) else math.inf
            time.sleep(0.5)


@contextmanager
def cluster_on(
    folder: Path, count: int, *, spare: int = 0, networks: int = 1, ipv6: bool = False, **env: str
) -> Iterator[Cluster]:
    """Start Ray on hosts; `spare` further hosts, the last of `machines`, are outside of the cluster."""
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "PYTHONPATH": str(ROOT)}
    shared = (folder, *(path for path in (ROOT, Path(sys.prefix)) if path.is_relative_to("/tmp")))
    with hosts(count + spare, *shared, networks=networks, ipv6=ipv6) as machines, ray_on(machines[:count], env):
        yield Cluster(machines, env, folder)


@contextmanager
def ray_on(machines: list[Host], env: dict[str, str]) -> Iterator[None]:
    """Start Ray on hosts, one after the other; the first has the head, and no place for processes of a run."""
    for alive, machine in enumerate(machines, 1):
        start_ray(machine, machines[0], alive, env)
    yield


def start_ray(machine: Host, head: Host, alive: int, env: dict[str, str]) -> None:
    """Start Ray on a host until `alive` nodes are in the cluster; on a busy machine Ray may give up before."""
    address = f"{head.netloc}:{PORT}"
    joining = (f"--address={address}", "--num-cpus=1")
    role = (
        ("--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false", "--no-monitor")
        if machine is head
        else joining
    )
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
    with cluster_on(folder, count) as cluster:
        yield cluster.run(*overrides), cluster.machines, cluster.start_ray


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


def resumed(run: Run) -> bool:
    """Whether the run has trained a step after its trainer was restarted."""
    _, found, after = run.output.rpartition("resuming from ")
    return bool(found and re.search(r"^ {1,4}\d+ ", after, re.MULTILINE))


def has_ray(host: Host) -> bool:
    """Whether Ray runs on a host: after a cut that outlasts Ray's patience it ends there."""
    for process in host.processes():
        with suppress(psutil.NoSuchProcess):
            if "raylet" in process.name():
                return True
    return False


def check_exactly_once(run: Run) -> None:
    """Check that no group of the journal is there twice, and no step is missing."""
    file = run.directory / DIRECTORY / JOURNAL
    steps = Journal(file, read_header(file)["data"]).steps()
    assert [step.version for step in steps] == list(range(1, len(steps) + 1))
    groups = [group for step in steps for group in step.groups]
    assert len(groups) == len(set(groups))
