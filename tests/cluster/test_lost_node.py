"""A run whose servers or trainer are lost with their node goes on as soon as the cluster has room, or a layout fits."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from clusters import existing_cluster
from running import ENDLESS, run, writing

# the trainer and a server on the first node, and a server alone on the second one, which is too small for both
TWO_SERVERS = ("actor.backend=megatron:d1@0", "rollout.backend=sglang:d2@1-2")
TWO_NODES = ("cluster.n_nodes=2", "cluster.n_gpus_per_node=2", "scheduler.type=ray")


@pytest.mark.long
def test_a_server_that_is_lost_with_its_node_is_restarted_on_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with existing_cluster(1, 0, n_cpus=2) as cluster:
        cluster.add_node(n_cpus=1)
        for name, value in cluster.env.items():
            monkeypatch.setenv(name, value)
        address = f"scheduler.address={cluster.address}"
        with run(tmp_path, *TWO_SERVERS, *TWO_NODES, *ENDLESS, address) as started:
            started.wait_for_step(2)
            cluster.remove_node()
            started.wait_for(lambda: started.serving()[-2:] == [1.0] * 2)
            waits = "Server 1 was lost with its node. It restarts once the cluster has room: it asks for 1 node"
            started.wait_for(lambda: waits in started.output)
            assert "1 server continues. The failed server is restarted." in started.output
            cluster.add_node(n_cpus=1)
            started.wait_for(lambda: started.serving()[-2:] == [2.0] * 2)
            assert "Server 1 restarted as server 2. It rejoins at the next weight update." in started.output
            before = len(started.serving())
            for process in writing(started.directory / "logs/rollout-1.log"):  # now that it is elsewhere
                process.kill()
            started.wait_for(lambda: 1.0 in started.serving()[before:])
            started.wait_for(lambda: started.serving()[-2:] == [2.0] * 2)
            started.process.send_signal(signal.SIGINT)
            assert started.end() == 130
            assert not writing(started.directory / "logs")


# a trainer rank and the server on the first node, and a trainer rank alone on the second one
TWO_RANKS = (
    "actor.backend=megatron:d2@1-2",
    "rollout.backend=sglang:d1@0",
    "recover.mode=auto",
    "recover.freq_steps=2",
)


@pytest.mark.long
@pytest.mark.parametrize("layouts", ["[]", "['megatron:d1@1']"])
def test_a_trainer_that_loses_a_node_restarts_on_another_one_or_in_a_smaller_layout(
    tmp_path: Path, layouts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with existing_cluster(1, 0, n_cpus=2) as cluster:
        cluster.add_node(n_cpus=1)
        for name, value in cluster.env.items():
            monkeypatch.setenv(name, value)
        address = f"scheduler.address={cluster.address}"
        with run(tmp_path, *TWO_RANKS, *TWO_NODES, *ENDLESS, address, f"recover.layouts={layouts}") as started:
            started.wait_for_step(3)
            servers = writing(started.directory / "logs/server-0.log")
            cluster.remove_node()
            started.wait_for(lambda: "The trainer restarts from the last checkpoint" in started.output)
            if layouts == "[]":
                started.wait_for(lambda: "The trainer waits for host" in started.output)
                cluster.add_node(n_cpus=1)
            else:
                started.wait_for(lambda: "The trainer continues as megatron[actor]:d1" in started.output)
            started.wait_for(lambda: "resuming from " in started.output)
            rows = len(started.steps())
            started.wait_for(lambda: len(started.steps()) > rows + 1)
            assert set(servers) <= set(writing(started.directory / "logs/server-0.log"))
            started.process.send_signal(signal.SIGINT)
            assert started.end() == 130
            assert not writing(started.directory / "logs")
