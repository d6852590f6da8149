"""A run on an existing cluster has a server more when a node comes, loses it with the node, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from clusters import existing_cluster
from running import Run, run

from areal_like.metrics.report import read_events

ENDLESS = (
    *("actor.backend=megatron:d1", "rollout.backend=sglang:d1", "cluster.n_gpus_per_node=2"),
    *("total_train_epochs=10000", "total_train_steps=null", "warm_start=null"),
    *("evaluator.at_start=false", "evaluator.at_end=false"),
    *("actor.init_model.num_hidden_layers=1", "actor.init_model.hidden_size=64", "train_dataset.batch_size=2"),
)
HUNG_S = 400


def serving(started: Run) -> list[float]:
    """How many servers held the weights at each step."""
    lines = (started.directory / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row["rollout/servers"] for row in rows if "rollout/servers" in row]


def writing(started: Run) -> list[psutil.Process]:
    """Living processes whose output goes to the run's logs: ranks, servers and the actors around them."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.readlink(f"/proc/{process.pid}/fd/1").startswith(str(started.directory / "logs")):
                found.append(process)
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def wait(started: Run, what: Callable[[], object], *, runs: bool = True) -> None:
    deadline = time.monotonic() + HUNG_S
    while not what():
        assert (started.process.poll() is None) == runs, started.output + started.errors
        assert time.monotonic() < deadline, started.output
        time.sleep(0.2)


@pytest.mark.long
def test_servers_come_and_go_with_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with existing_cluster(1, 0, n_cpus=2) as cluster:
        for name, value in cluster.env.items():
            monkeypatch.setenv(name, value)
        ray = ("scheduler.type=ray", f"scheduler.address={cluster.address}", "rollout.max_servers=2")
        with run(tmp_path, *ENDLESS, *ray) as started:
            started.wait_for_step(2)
            waits = "server 1 is started once the cluster has room for it (rollout.max_servers): it asks for 1 node"
            wait(started, lambda: waits in started.output)
            assert set(serving(started)) == {1.0}
            cluster.add_node()
            wait(started, lambda: serving(started)[-2:] == [2.0] * 2)
            cluster.remove_node()
            wait(started, lambda: serving(started)[-2:] == [1.0] * 2)
            cluster.add_node()
            wait(started, lambda: serving(started)[-2:] == [2.0] * 2)
            lanes = {(event.lane, event.name) for event in read_events(started.directory)}
            assert {("rollout 1", "start-up"), ("server 1", "generating"), ("server 2", "generating")} <= lanes
            assert len(writing(started)) > 6
            started.process.send_signal(signal.SIGKILL)
            started.process.wait()
            wait(started, lambda: not writing(started) and not started.weights.exists(), runs=False)
