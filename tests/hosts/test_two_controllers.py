"""A run's directory has one controller, also over hosts whose locks do not reach each other."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest
from host_runs import check_exactly_once, cluster_on, interrupt
from namespaces import reason_to_skip
from running import ENDLESS

from areal_like.core.checkpoint.store import DIRECTORY

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.long,
    pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip())),
]
# a trainer and a server on hosts of their own; the controller is on the last of four hosts, Ray's head on the first
COMMAND = (
    *("actor.backend=megatron:d1", "rollout.backend=sglang:d1", "cluster.n_nodes=2", *ENDLESS),
    *("recover.mode=auto", "recover.freq_steps=2"),
)


def test_a_second_controller_on_another_host_is_refused_without_locks(tmp_path: Path) -> None:
    """The second host has a file of its own in place of the lock, as on a file system that keeps locks to the host."""
    with cluster_on(tmp_path, 4) as cluster:
        run, other = cluster.run(*COMMAND, on=3), cluster.machines[2]
        run.wait_for_step(2)
        lock = run.directory / DIRECTORY / "lock"
        assert other.start("touch", "/tmp/lock").wait() == 0
        assert other.start("mount", "--bind", "/tmp/lock", lock).wait() == 0
        assert other.start("flock", "--nonblock", lock, "true").wait() == 0
        assert cluster.machines[1].start("flock", "--nonblock", lock, "true").wait() == 1
        second = cluster.run(*COMMAND, on=2, output="second-")
        assert second.end() == 1
        (controller,) = psutil.Process(run.process.pid).children()
        names = subprocess.run(
            ["grep", "NSpid", f"/proc/{controller.pid}/status"], capture_output=True, text=True, check=True
        )
        owner = f"process {names.stdout.split()[-1]} on host h4"
        fact = f"{run.directory} belongs to a run that has not ended: {owner}. Each run needs a directory of its own"
        assert f"{fact}. End it, or set trial_name to another name" in second.errors
        trained = len(run.steps())
        run.wait_for(lambda: len(run.steps()) > trained + 2)
        check_exactly_once(run)
        interrupt(run)
