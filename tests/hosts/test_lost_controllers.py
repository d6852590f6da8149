"""The loss of Ray's head or of the controller's host ends a run on all hosts, and the same command resumes it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from host_runs import Cluster, check_exactly_once, cluster_on, interrupt, ray_on
from namespaces import Host, reason_to_skip
from running import ENDLESS, SCRIPT, Run

from areal_like.backends.ray.janitor import RUN_VARIABLE

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.long,
    pytest.mark.covers("resume after SIGKILL"),
    pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip())),
]
# a trainer and a server on hosts of their own; the controller is on the last of four hosts, Ray's head on the first
COMMAND = (
    *("actor.backend=megatron:d1", "rollout.backend=sglang:d1", "cluster.n_nodes=2", *ENDLESS),
    *("recover.mode=auto", "recover.freq_steps=2"),
)
ENDS_S = 90.0  # after the loss, on every host


def of_the_run(run: Run, machines: Sequence[Host]) -> list[psutil.Process]:
    """Processes of a run on hosts: its controller, members by their environment or output, and janitors."""
    found, logs = [], str(run.directory / "logs")
    for machine in machines:
        for process in machine.processes():
            with suppress(psutil.Error, OSError):
                command = " ".join(process.cmdline())
                written = os.readlink(f"/proc/{process.pid}/fd/1").startswith(logs)
                if written or "areal_like" in command or str(SCRIPT) in command or RUN_VARIABLE in process.environ():
                    found.append(process)
    return found


def switch_off(host: Host) -> None:
    """End all processes of a host but its first one, so that it may start again."""
    for process in host.processes():
        with suppress(psutil.NoSuchProcess):
            process.kill()


def lose(run: Run, host: Host, how: str) -> None:
    """Kill the controller alone, or all processes of a host, or cut the host off."""
    if how == "sigkill":
        (controller,) = psutil.Process(run.process.pid).children()
        controller.kill()
    elif how == "kill":
        switch_off(host)
    else:
        host.cut()


def check_the_end(run: Run, machines: Sequence[Host], since: float, *, killed: bool) -> None:
    """Wait until no process of the run is left on any host, which has to be soon; a controller that lives says why."""
    assert of_the_run(run, machines)
    while left := of_the_run(run, machines):
        assert time.monotonic() - since < ENDS_S, f"{left}\n{run.output}\n{run.errors}"
        time.sleep(0.5)
    code = run.end()
    print(f"ended with {code} after {time.monotonic() - since:.1f} s\n{run.errors}")
    assert code == (-signal.SIGKILL if killed else 1)
    assert killed or "did not answer for" in run.errors


def check_resumption(cluster: Cluster, on: int) -> None:
    """Give the command again, on a host; it trains on from a checkpoint."""
    run = cluster.run(*COMMAND, on=on, output="again-")
    run.wait_for(lambda: "resuming from" in run.output)
    trained = len(run.steps())
    run.wait_for(lambda: len(run.steps()) > trained + 2)
    check_exactly_once(run)
    interrupt(run)


@pytest.mark.parametrize(
    ("lost", "controller", "how"),
    [
        pytest.param(0, 3, "kill", id="head-kill"),
        pytest.param(0, 3, "cut", id="head-cut"),
        pytest.param(3, 3, "sigkill", id="controller-sigkill"),
        pytest.param(3, 3, "kill", id="controller-kill"),
        pytest.param(3, 3, "cut", id="controller-cut"),
        pytest.param(0, 0, "kill", id="both-kill"),
        pytest.param(0, 0, "cut", id="both-cut"),
    ],
)
def test_a_run_without_head_or_controller_ends_everywhere_and_resumes(
    tmp_path: Path, lost: int, controller: int, how: str
) -> None:
    with cluster_on(tmp_path, 4) as cluster:
        run, host = cluster.run(*COMMAND, on=controller), cluster.machines[lost]
        run.wait_for_step(5)
        since = time.monotonic()
        lose(run, host, how)
        check_the_end(run, cluster.machines, since, killed=lost == controller and how != "cut")
        if lost:
            check_resumption(cluster, 1)
            return
        host.mend()
        for machine in cluster.machines:
            switch_off(machine)
        with ray_on(cluster.machines, cluster.env):
            check_resumption(cluster, controller)
