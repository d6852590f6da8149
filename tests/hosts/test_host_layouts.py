"""Runs whose trainer is on several hosts, in each direction of parallelism, with other parts of a run around it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from host_runs import cluster_on, host_of, interrupt
from namespaces import reason_to_skip
from running import ENDLESS, ROOT

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.long,
    pytest.mark.covers("updates: collective", "updates: disk", "FSDP", "agents"),
    pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip())),
]
AGENT = (f"workflow={ROOT / 'tests/run/branching_agent.py'}:run", "episode.max_tokens=120")
# two trainer ranks on hosts of their own, and the controller on the third worker's host, which is not Ray's head
NOBODY = dict.fromkeys(("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
RUNS = {
    "tp": ("actor.backend=megatron:t2", "weight_update.mode=disk"),
    "pp": ("actor.backend=megatron:p2", "actor.init_model.num_hidden_layers=2", *AGENT),
    "fsdp": ("actor.backend=fsdp:d2", "recover.mode=auto"),
}


def test_trainers_on_several_hosts_train(tmp_path: Path) -> None:
    """Every process has the variables of a proxy that nobody runs."""
    with cluster_on(tmp_path, 4, **NOBODY) as cluster:
        for name, overrides in RUNS.items():
            layout = ("rollout.backend=sglang:d1", "cluster.n_nodes=3")
            run = cluster.run(*ENDLESS, *layout, *overrides, on=3, trial=name)
            run.wait_for_step(2)
            logs = ("actor-0.log", "actor-1.log", "server-0.log")
            assert len({host_of(run, log, cluster.machines).number for log in logs} - {1}) == 3
            row = json.loads((run.directory / "metrics.jsonl").read_text().splitlines()[-1])
            assert row["rollout/servers"] == 1.0
            assert all(row[f"memory/{process}"] > 0.1 for process in ("controller", "actor-0", "actor-1", "server-0"))
            interrupt(run)
            print(name, "trained")
