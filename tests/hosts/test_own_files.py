"""Hosts that share no directory: the run trains with collective updates, and says what it cannot do without one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from host_runs import cluster_on, host_of, written_by
from namespaces import reason_to_skip
from running import ENDLESS

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.long,
    pytest.mark.covers("updates: collective"),
    pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip())),
]
LAYOUT = ("actor.backend=megatron:d2", "rollout.backend=sglang:d1", "cluster.n_nodes=3")
OWN = "/tmp/own"  # of each host alone


def test_a_run_without_a_shared_directory(tmp_path: Path) -> None:
    with cluster_on(tmp_path, 4) as cluster:
        overrides = (*LAYOUT, *ENDLESS, f"cluster.fileroot={OWN}")
        disk = cluster.run(*overrides, "weight_update.mode=disk")
        assert disk.end() == 1
        assert f"does not see a file that this host has written to {OWN}" in disk.errors
        assert "weight_update.mode=disk needs files" in disk.errors
        assert "or set weight_update.mode=collective" in disk.errors
        resumes = cluster.run(*overrides, "recover.mode=auto")
        assert resumes.end() == 1
        assert "recover.mode=auto needs files" in resumes.errors and "set recover.mode=off" in resumes.errors
        run = cluster.run(*overrides, trial="apart")
        run.directory = Path(OWN) / "test/apart"  # as each host sees it
        run.wait_for_step(2)
        hosts = ", ".join(sorted(host.address for host in cluster.machines[1:]))
        assert f"cluster.fileroot is not shared by this host and {hosts}" in run.errors
        rank = written_by(run, "actor-1.log")
        host = host_of(run, "actor-1.log", cluster.machines)
        assert os.path.exists(f"/proc/{host.init.pid}/root{OWN}/test/apart/initial_model/config.json")
        rank[-1].kill()
        assert run.end() == 1
        assert "actor rank 1 failed during" in run.errors
        assert f"the end of {OWN}/test/apart/logs/actor-1.log on host {host.address}:" in run.errors
