"""A run on an existing cluster has a server more when a node comes, loses it with the node, and leaves nothing."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from clusters import existing_cluster
from running import ENDLESS, run, writing

from areal_like.metrics.event_file import read_events

ONE_SERVER = ("actor.backend=megatron:d1", "rollout.backend=sglang:d1", "cluster.n_gpus_per_node=2")


@pytest.mark.long
def test_servers_come_and_go_with_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with existing_cluster(1, 0, n_cpus=2) as cluster:
        for name, value in cluster.env.items():
            monkeypatch.setenv(name, value)
        ray = ("scheduler.type=ray", f"scheduler.address={cluster.address}", "rollout.max_servers=2")
        with run(tmp_path, *ONE_SERVER, *ENDLESS, *ray) as started:
            started.wait_for_step(2)
            waits = "Server 1 starts once the cluster has room (rollout.max_servers): it asks for 1 node"
            started.wait_for(lambda: waits in started.output)
            assert set(started.serving()) == {1.0}
            cluster.add_node()
            started.wait_for(lambda: started.serving()[-2:] == [2.0] * 2)
            cluster.remove_node()
            started.wait_for(lambda: started.serving()[-2:] == [1.0] * 2)
            cluster.add_node()
            started.wait_for(lambda: started.serving()[-2:] == [2.0] * 2)
            lanes = {(event.lane, event.name) for event in read_events(started.directory)}
            assert {("rollout 1", "start-up"), ("server 1", "generating"), ("server 2", "generating")} <= lanes
            assert len(writing(started.directory / "logs")) > 6
            started.process.send_signal(signal.SIGKILL)
            started.process.wait()
            started.wait_for(
                lambda: not writing(started.directory / "logs") and not started.weights.exists(), lives=False
            )
