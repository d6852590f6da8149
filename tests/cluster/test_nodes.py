"""Nodes that differ, or lack something, are named with the key and the fix before processes start."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clusters import HERE, ROOT, existing_cluster

import allocation
from allocation import Cluster
from areal_like.backends.ray import nodes
from areal_like.backends.ray.nodes import NodeReport, check_nodes, differences
from areal_like.core.errors import ClusterError

ALIKE = NodeReport(
    "10.0.0.1", "3.12.1", {"torch": "2.9.1", "ray": "2.60.0"}, ["H200"], ["570.1"], 64 << 30, 9 << 30, "/tmp", [], 0.0
)


def judge(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, ports: str | None = None) -> list[str]:
    """Check two nodes, of which the second differs from the first."""

    async def ask(*_: object) -> list[NodeReport]:
        return [ALIKE, replace(ALIKE, host="10.0.0.2", **changes)]

    warnings: list[str] = []
    monkeypatch.setattr(nodes, "_ask", ask)
    paths = {"actor.path": Path("/models/m"), "critic.path": Path("/models/m")}
    asyncio.run(check_nodes(None, paths, warnings.append, ports))  # type: ignore[arg-type]
    return warnings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"python": "3.13.0"}, ["different versions of Python: 3.12 on 10.0.0.1; 3.13 on 10.0.0.2. All nodes"]),
        ({"packages": {"torch": "2.8.0", "ray": "2.60.0"}}, ["of torch: 2.9.1 on 10.0.0.1; 2.8.0 on 10.0.0.2"]),
        (
            {"packages": {"torch": None, "ray": "2.59.0"}},
            ["of torch: 2.9.1 on 10.0.0.1; none on 10.0.0.2", "of ray: 2.60.0 on 10.0.0.1; 2.59.0 on 10.0.0.2"],
        ),
        (
            {"missing": ["/models/m"]},
            ["node 10.0.0.2 does not have /models/m (actor.path)", "set actor.path to a path"],
        ),
        ({"unreachable": ["10.0.0.1"]}, ["node 10.0.0.2 cannot connect to node 10.0.0.1", "Open the firewall"]),
        (
            {"unreachable_ports": ["10.0.0.1:41000"]},
            ["node 10.0.0.2 cannot connect to 10.0.0.1:41000, a port that was free", "set cluster.ports to a range"],
        ),
        ({"no_port": "Address already in use"}, ["node 10.0.0.2 cannot open a port", "Set cluster.ports"]),
        ({"free_disk": 1 << 20}, ["node 10.0.0.2 has 1 MiB free in /tmp", "set TMPDIR on the node"]),
    ],
)
def test_a_node_with_which_no_run_would_succeed_is_refused(changes, words, monkeypatch) -> None:
    with pytest.raises(ClusterError) as refused:
        judge(changes, monkeypatch)
    assert all(each in str(refused.value) for each in words), refused.value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"ahead_s": 0.5, "free_memory": 40 << 30}, []),
        ({"gpus": ["L40"]}, ["the nodes have different GPUs: H200 on 10.0.0.1; L40 on 10.0.0.2"]),
        ({"drivers": ["550.2"]}, ["the nodes have different NVIDIA drivers: 570.1 on 10.0.0.1; 550.2 on 10.0.0.2"]),
        ({"python": "3.12.4"}, ["the nodes have different patch versions of Python: 3.12.1 on 10.0.0.1; 3.12.4 on"]),
        ({"free_memory": 8 << 30}, ["node 10.0.0.2 has 8 GiB of free memory, another node has 64 GiB"]),
        ({"ahead_s": -7.0}, ["the clock of node 10.0.0.2 is 7.0 s behind this host's"]),
    ],
)
def test_a_difference_with_which_a_run_works_is_a_warning(changes, words, monkeypatch) -> None:
    warnings = judge(changes, monkeypatch)
    assert len(warnings) == len(words)
    assert all(each in warning for each, warning in zip(words, warnings, strict=True))


def test_every_value_names_all_of_its_nodes() -> None:
    three = [replace(ALIKE, host=host, gpus=[gpu]) for host, gpu in (("a", "H200"), ("b", "L40"), ("c", "H200"))]
    assert list(differences(three)) == ["the nodes have different GPUs: H200 on a, c; L40 on b"]


def test_ports_of_gloo_outside_of_the_range_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge({"own_ports": [20000, 20100]}, monkeypatch, "20000-21000") == []
    (warning,) = judge({"own_ports": [32768, 60999]}, monkeypatch, "20000-21000")
    assert "on node 10.0.0.2 use ports 32768-60999" in warning
    assert judge({"own_ports": [32768, 60999]}, monkeypatch) == []
    with pytest.raises(
        ClusterError, match=r"a port of cluster\.ports=20000-21000\. Open the ports 20000-21000 in the firewall"
    ):
        judge({"unreachable_ports": ["[fd00::1]:20001"]}, monkeypatch, "20000-21000")


@pytest.mark.long
@pytest.mark.parametrize("n_nodes", [1, 2])
def test_nodes_of_a_cluster_are_asked_and_a_path_that_they_lack_is_named(tmp_path: Path, n_nodes: int) -> None:
    plan = allocation.compile("megatron:d2", cluster=Cluster(n_nodes, 2 // n_nodes))
    ask = {"plan": plan.to_json(), "uses_gpus": False, "timeout_s": 600}
    asks = [ask | {"files": {"actor.path": str(tmp_path)}}, ask | {"files": {"actor.path": "/nowhere"}}]
    with existing_cluster(n_nodes, 0, n_cpus=2 // n_nodes) as cluster:
        answer = subprocess.run(
            [sys.executable, str(HERE / "probe.py"), cluster.address, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(ROOT), **cluster.env},
            input="\n".join(map(json.dumps, asks)),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    fine, refused = map(json.loads, answer.stdout.splitlines())
    assert "error" not in fine and fine["warnings"] == []
    assert "127.0.0.1 does not have /nowhere (actor.path), which every node reads" in refused["error"]
