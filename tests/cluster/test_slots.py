"""Asking a cluster for GPUs ends with an answer or a cause."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import services
from ray.exceptions import RpcError, WorkerCrashedError

import allocation
from areal_like.backends.ray import placement, ray_cluster
from areal_like.core.config.schema import SchedulerConfig
from areal_like.core.errors import ClusterError


class Task:
    """A Ray task whose result is what a coroutine gives."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def options(self, **_: Any) -> Task:
        return self

    def remote(self) -> Any:
        return self._answer()


async def silence() -> None:
    await asyncio.sleep(600)


async def crash() -> None:
    raise WorkerCrashedError


@pytest.mark.parametrize(
    ("answer", "message"),
    [(silence, "did not report within 0 s"), (crash, "did not report which .* died unexpectedly")],
)
def test_nodes_that_do_not_say_their_gpus(monkeypatch: pytest.MonkeyPatch, answer: Any, message: str) -> None:
    monkeypatch.setattr(ray, "remote", lambda _: Task(answer))
    monkeypatch.setattr(placement, "GPU_IDS_S", 0.01)
    group: Any = None
    with pytest.raises(ClusterError, match=message):
        asyncio.run(placement._granted_gpus(group, {0: {"GPU": 1.0}}, deadline=0))


class Group:
    """A placement group that was granted, or not when Ray fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def wait(self, _: float) -> bool:
        if self._error:
            raise self._error
        return True


@pytest.mark.parametrize(
    ("group", "nodes", "message"),
    [
        (Group(), {}, "a node was lost as soon as it had been granted"),
        (Group(), {0: "gone"}, "a node was lost as soon as it had been granted"),
        (Group(RpcError("GCS does not answer")), {0: "here"}, "Ray failed: GCS does not answer"),
    ],
    ids=["node that is not in the group any more", "node that is unknown", "GCS that is silent"],
)
def test_what_is_lost_while_room_is_sought(monkeypatch: pytest.MonkeyPatch, group: Any, nodes: Any, message: str):
    removed: list[Any] = []
    groups = import_module("ray.util.placement_group")  # whose name is a function in the package
    monkeypatch.setattr(groups, "placement_group", lambda *_, **__: group)
    monkeypatch.setattr(groups, "placement_group_table", lambda _: {"bundles_to_node_id": nodes})
    monkeypatch.setattr(groups, "remove_placement_group", removed.append)
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "here", "NodeManagerAddress": "10.0.0.7", "Alive": True}])

    async def seek() -> None:
        plan = allocation.compile("sglang:d1|megatron:d1")
        async with placement.place(plan, uses_gpus=False, elastic=True, timeout_s=1):
            pass

    with pytest.raises(ClusterError, match=message):
        asyncio.run(seek())
    assert removed == [group]


def test_a_private_cluster_that_is_not_up_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def late(*_: Any, **__: Any) -> None:
        raise Exception("The current node timed out during startup.")  # as ray/_private/node.py does after 30 s

    monkeypatch.setattr(ray, "init", late)
    monkeypatch.setattr(ray_cluster, "_configure", lambda _: None)
    cluster = ray_cluster.ray_cluster(SchedulerConfig(), n_slots=1, uses_gpus=False, directory=tmp_path)
    with pytest.raises(ClusterError, match="private Ray cluster did not accept this run: The current node"), cluster:
        pass


def node_that_is_up_at(question: int) -> Callable[..., Any]:
    """Return what stands in for Ray's look-up of a node: it finds none until a question."""
    asked = 0

    def get_node(gcs_address: str, node_id: str) -> dict[str, str]:
        nonlocal asked
        asked += 1
        if asked < question:
            raise RuntimeError(f"No node with id {node_id}")
        return {"node": node_id, "gcs": gcs_address}

    return get_node


def impatient_init(*_: Any, **__: Any) -> None:
    """Start as Ray does, with a time limit that ends after the first question."""
    try:
        found = services.get_node("gcs", "ours")
    except RuntimeError:
        raise Exception("The current node timed out during startup.") from None
    assert found == {"node": "ours", "gcs": "gcs"}


def test_a_private_cluster_may_start_slower_than_ray_allows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = node_that_is_up_at(question=3)
    monkeypatch.setattr(services, "get_node", slow)
    monkeypatch.setattr(ray, "init", impatient_init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray_cluster, "_configure", lambda _: None)
    monkeypatch.setattr(ray_cluster, "NODE_POLL_S", 0.0)
    with ray_cluster.ray_cluster(SchedulerConfig(), n_slots=1, uses_gpus=False, directory=tmp_path):
        assert services.get_node is slow, "only the start waits"


def test_a_private_cluster_that_never_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    never = node_that_is_up_at(question=10**9)
    monkeypatch.setattr(services, "get_node", never)
    monkeypatch.setattr(ray, "init", impatient_init)
    monkeypatch.setattr(ray_cluster, "_configure", lambda _: None)
    monkeypatch.setattr(ray_cluster, "NODE_LIMIT_S", 0.0)
    cluster = ray_cluster.ray_cluster(SchedulerConfig(), n_slots=1, uses_gpus=False, directory=tmp_path)
    with pytest.raises(ClusterError, match="The current node timed out"), cluster:
        pass
    assert services.get_node is never
