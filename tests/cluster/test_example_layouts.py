"""Every layout that the checks call able to start starts, device by device as planned, with processes for GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import HERE, ROOT, ExistingCluster, existing_cluster

import allocation
from allocation import Cluster, Device, Plan
from areal_like.backends.ray.resources import check_existing
from areal_like.core.config.load import load
from areal_like.core.config.schema import SchedulerConfig
from areal_like.preflight.layout import find_plan

pytestmark = pytest.mark.long
EXAMPLES = sorted((ROOT / "examples/math").glob("*.yaml"))
FIRST = 10  # the id of each node's first GPU, so that an id is not an index


@pytest.fixture(scope="module")
def four_nodes() -> Iterator[ExistingCluster]:
    """Four nodes of eight GPUs, as the largest example asks for."""
    ids = ",".join(str(FIRST + index) for index in range(8))
    with existing_cluster(4, 8, CUDA_VISIBLE_DEVICES=ids) as cluster:
        yield cluster


def start(
    log_dir: Path,
    cluster: ExistingCluster | None,
    *plans: Plan,
    uses_gpus: bool = True,
    timeout_s: float = 900,
    cwd: Path | None = None,
) -> list[dict[str, Any]]:
    """What the members of each plan saw that was started, one plan after the other."""
    lines = [json.dumps({"plan": p.to_json(), "uses_gpus": uses_gpus, "timeout_s": timeout_s}) for p in plans]
    answer = subprocess.run(
        [sys.executable, str(HERE / "probe.py"), cluster.address if cluster else "local", str(log_dir)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(cluster.env if cluster else {})},
        input="\n".join(lines),
        cwd=cwd,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in answer.stdout.splitlines()]


def compiled(text: str, cluster: Cluster) -> Plan:
    return allocation.compile(text, cluster=cluster)


def assert_as_planned(plan: Plan, seen: dict[str, Any]) -> None:
    """Plan devices and what the members saw are the same but for the names of nodes and GPUs."""
    places: dict[Device, tuple[str, str]] = {}
    for engine in plan.engines:
        members = [server.devices for server in engine.servers] or [(device,) for device in engine.devices]
        assert len(seen[engine.role]) == len(members)
        for devices, member in zip(members, seen[engine.role], strict=True):
            gpus = member["CUDA_VISIBLE_DEVICES"].split(",")
            for device, gpu in zip(devices, gpus, strict=True):
                assert places.setdefault(device, (member["node"], gpu)) == (member["node"], gpu)
    assert len(set(places.values())) == len(plan.devices)  # no GPU stands for two
    nodes = {device.node: node for device, (node, _) in places.items()}
    assert len(set(nodes.values())) == len(nodes)
    assert all(nodes[device.node] == node for device, (node, _) in places.items())


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_layout_of_every_example(file: Path, four_nodes: ExistingCluster, tmp_path: Path) -> None:
    loaded = load(file)
    plan, findings = find_plan(loaded.config, None)
    assert plan is not None, findings
    if loaded.config.device == "cpu":
        (seen,) = start(tmp_path, None, plan, uses_gpus=False)
        processes = {engine.role: len(engine.servers) or len(engine.devices) for engine in plan.engines}
        assert {role: len(members) for role, members in seen.items()} == processes
        assert {member["CUDA_VISIBLE_DEVICES"] for members in seen.values() for member in members} == {""}
        return
    assert list(check(four_nodes, plan)) == []
    (seen,) = start(tmp_path, four_nodes, plan)
    assert_as_planned(plan, seen)


def test_the_gpus_that_at_names(four_nodes: ExistingCluster, tmp_path: Path) -> None:
    one, two = Cluster(1, 8), Cluster(2, 8)
    plans = [
        compiled("sglang:d1@4+megatron:d2@6-7", one),
        compiled("sglang:d2t2@12-15+megatron:d4@0-3", two),
        compiled("sglang:d1t2@2-3|megatron:d2", one),
    ]
    for plan, seen in zip(plans, start(tmp_path, four_nodes, *plans), strict=True):
        assert_as_planned(plan, seen)
        for engine in plan.engines:
            ids = [gpu for member in seen[engine.role] for gpu in member["CUDA_VISIBLE_DEVICES"].split(",")]
            assert ids == [str(FIRST + device.gpu) for device in engine.devices]


def test_what_every_process_of_a_run_gets(four_nodes: ExistingCluster, tmp_path: Path) -> None:
    plan = compiled("sglang:d1+megatron:d1", Cluster(1, 8))
    for cluster in (None, four_nodes):
        (seen,) = start(tmp_path, cluster, plan, uses_gpus=cluster is not None)
        for (member,) in seen.values():
            assert member["GLOO_SOCKET_IFNAME"] == member["NCCL_SOCKET_IFNAME"] == "lo"  # where both clusters listen
            assert member["MALLOC_TRIM_THRESHOLD_"] and member["MALLOC_MMAP_THRESHOLD_"]
            assert cluster or member["nice"] == os.nice(0)  # Ray lowers the priority of workers
            assert not member["TORCHINDUCTOR_CACHE_DIR"].startswith(member["TMPDIR"])


def test_gpus_that_another_job_holds(tmp_path: Path) -> None:
    with existing_cluster(1, 4) as cluster:
        cluster.take_gpus()
        late, other, free = start(
            tmp_path,
            cluster,
            compiled("megatron:d2@2-3", Cluster(1, 4)),
            compiled("megatron:d2@0-1", Cluster(1, 4)),
            compiled("megatron:d2", Cluster(1, 4)),
            timeout_s=5,
        )
    assert "not granted within 5 s" in late["error"] and "asks for 1 node with 2 CPU, 4 GPU" in late["error"]
    assert "requests GPUs 0, 1 of a node with `@`, and Ray granted GPUs 1, 2 of 127.0.0.1" in other["error"]
    assert [member["CUDA_VISIBLE_DEVICES"] for member in free["actor"]] == ["1", "2"]


def test_a_directory_that_the_nodes_do_not_share_is_told_with_the_node_and_the_key(
    four_nodes: ExistingCluster, tmp_path: Path
) -> None:
    """`/proc/self/cwd` is another directory for each process, as a local disk is for each host."""
    directory = Path("/proc/self/cwd/runs")
    (seen,) = start(directory, four_nodes, compiled("megatron:d2", Cluster(1, 8)), cwd=tmp_path)
    assert seen["error"].startswith("node 127.0.0.1 does not see a file that this host has written to")
    assert f"{directory}: No such file or directory." in seen["error"]
    assert "Set cluster.fileroot to a directory on a file system that all of them share" in seen["error"]
    assert list((tmp_path / "runs").iterdir()) == []


def check(cluster: ExistingCluster, plan: Plan, **env: str) -> list[tuple[str, str, str, str]]:
    """The checks of a process in the cluster's environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (cluster.env | env).items():
            patch.setenv(name, value)
        return list(check_existing(SchedulerConfig(type="ray", address=cluster.address), plan, uses_gpus=True))


def test_an_existing_cluster_that_is_too_small(four_nodes: ExistingCluster) -> None:
    assert check(four_nodes, compiled("sglang:d16t2", Cluster(4, 8))) == []
    ((key, message, _),) = check(four_nodes, compiled("sglang:d20t2", Cluster(5, 8)))
    assert key == "cluster.n_nodes"
    assert "the plan asks for 5 nodes with 8 CPU, 8 GPU" in message
    assert "the cluster has 4 nodes with 8 CPU, 8 GPU" in message
    ((key, message, _),) = check(four_nodes, compiled("sglang:d1@8", Cluster(1, 16)))
    assert "the plan asks for 1 node with 1 CPU, 9 GPU" in message
    # Four of these fit on two nodes, but not where `@` makes each plan node one of the cluster's.
    assert check(four_nodes, compiled("sglang:d5t4", Cluster(5, 4))) == []
    assert check(four_nodes, compiled("sglang:d5t4@0-19", Cluster(5, 4))) != []


def test_an_existing_cluster_that_does_not_answer(four_nodes: ExistingCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = compiled("megatron:d1", Cluster(1, 8))
    ((key, message, _),) = check(four_nodes, plan, RAY_AUTH_TOKEN="0" * 64)
    assert key == "scheduler.address" and "its authentication token is not this process's" in message
    nobody = SchedulerConfig(type="ray", address="127.0.0.1:1")
    ((key, message, _),) = check_existing(nobody, plan, uses_gpus=True)
    assert key == "scheduler.address" and "nothing answers at 127.0.0.1:1" in message
    monkeypatch.setattr("areal_like.backends.ray.resources.ASK_LIMIT_S", 0.1)
    ((key, message, _),) = check(four_nodes, plan)
    assert key == "scheduler.address" and "did not list its nodes within 0.1 s" in message


def test_a_host_without_a_cluster(tmp_path: Path) -> None:
    code = "import psutil; psutil.process_iter = lambda *_, **__: iter(()); from areal_like.backends.ray.listing import main"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(tmp_path), "RAY_ADDRESS": ""}
    answer = subprocess.run([sys.executable, "-c", f"{code}; main()", "auto"], env=env, capture_output=True, text=True)
    problem = json.loads(answer.stdout.splitlines()[-1])["problem"]
    assert problem.endswith(
        "RAY_ADDRESS is not set and no Ray cluster runs on this host; start one with `ray start --head`"
    )
