"""The controller's round trips to Ray at the start of a run, with simulated workers: the same for any number of them.

Calls of Ray that wait for another process take a second of simulated time here: the first use of what `ray.remote`
returned (its export), `ray.nodes`, `ray.put`, the table of a placement group, and results. Ray creates actors, calls
their methods and kills them without waiting.
"""

from __future__ import annotations

import asyncio
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

import allocation
from areal_like.backends.ray import nodes
from areal_like.backends.ray import run as cluster_run
from areal_like.backends.ray.nodes import check_nodes
from areal_like.backends.ray.placement import place
from areal_like.backends.ray.run import RunCluster, _caretakers
from benchmarks.simulated_time import SimulatedLoop, simulate

FACTS = {
    "python": "3.12.1",
    "packages": {},
    "gpus": ["H200"],
    "drivers": [],
    "temporary": "/tmp",
    "missing": [],
    "free_memory": 1 << 40,
    "free_disk": 1 << 40,
    "own_ports": [1024, 65535],
}
ANSWERS = {"open_port": (1, ""), "facts": FACTS, "find_unreachable": [], "call": None, "build": None}


class Rank:
    """A process of a group."""


def trip(answer: Any = None) -> Any:
    """Return the answer of another process."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    loop.advance(1.0)
    return answer


class Remote:
    """A remote function or class; a task answers by the module of its function."""

    def __init__(self, target: Any) -> None:
        self._target, self._bundle, self._exported = target, 0, [False]

    def options(self, *, scheduling_strategy: Any, **_: Any) -> Remote:
        placed = Remote(self._target)
        placed._bundle, placed._exported = scheduling_strategy.placement_group_bundle_index, self._exported
        return placed

    def remote(self, *_: Any, **__: Any) -> Any:
        if not self._exported[0]:
            self._exported[0] = trip(True)
        if isinstance(self._target, type):
            return Actor()
        answers = {"placement": {place: str(place) for place in range(8)}, "shared_files": ""}
        return result(answers.get(self._target.__module__.rpartition(".")[2], [("eth0", address(self._bundle))]))


class Actor:
    """An actor: every method answers."""

    def __getattr__(self, name: str) -> Any:
        class Method:
            remote = staticmethod(lambda *_: result(time.time() if name == "now" else ANSWERS[name]))

        return Method


def result(answer: Any) -> asyncio.Future[Any]:
    """Return what is there a second later; results that are asked for together come together."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    loop.call_later(1.0, lambda: future.done() or future.set_result(answer))
    return future


def address(bundle: int) -> str:
    return f"10.0.{bundle // 256}.{bundle % 256}"


class Group:
    """A granted placement group."""

    def wait(self, _: float) -> bool:
        return trip(True)


@pytest.fixture
def simulated_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = import_module("ray.util.placement_group")  # whose name is a function in the package
    there = [
        {"NodeID": str(each), "NodeManagerAddress": address(each), "NodeManagerPort": 1, "Alive": True}
        for each in range(256)
    ]
    table = {"bundles_to_node_id": {each: str(each) for each in range(256)}}
    for module, name, stand_in in (
        (groups, "placement_group", lambda *_, **__: trip(Group())),
        (groups, "placement_group_table", lambda _: trip(table)),
        (groups, "remove_placement_group", lambda _: None),
        (ray, "remote", Remote),
        (ray, "nodes", lambda: trip(there)),
        (ray, "put", trip),
        (ray, "kill", lambda *_, **__: None),
        (ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="10.0.0.0:6379", get_node_id=lambda: "0")),
        (cluster_run, "accepts", refuse),
        (nodes, "NodeProbe", type("NodeProbe", (), {"find_unreachable": lambda *_: []})),
    ):
        monkeypatch.setattr(module, name, stand_in)


async def refuse(*_: Any) -> bool:
    """Stand in for a connection to a node."""
    return False


async def start(size: int, folder: Path) -> float:
    """Start so many ranks, and as many servers; return the round trips."""
    plan = allocation.compile(f"sglang:d{size}|megatron:d{size}")
    async with place(plan, uses_gpus=True, elastic=True, timeout_s=1) as placement:
        cluster = RunCluster("run", folder / "shared", folder / "logs", placement, 600, interface="eth0")
        cluster.placement = await cluster.prepare(placement)
        await check_nodes(cluster.placement, {"actor.path": Path("model")}, print, None, "eth0")
        async with _caretakers(cluster):
            devices = [(device,) for device in plan.engine("actor").devices]
            ranks = await cluster.start_group("actor", Rank, devices, lambda *_: {}, call_timeout_s=600)
            await ranks.call_one(0, "listen", ranks.meeting_host, phase="start-up")
            await ranks.call_all("build", "address", 1, "engine", phase="start-up")
            devices = [server.devices for server in plan.engine("rollout").servers]
            servers = await cluster.start_group("rollout", Rank, devices, lambda *_: {}, call_timeout_s=600)
            await servers.call_all("start", phase="start-up")
            assert len(ranks.members) == len(servers.members) == size
            return asyncio.get_running_loop().time()


@pytest.mark.usefixtures("simulated_ray")
def test_a_start_takes_as_many_round_trips_for_8_as_for_1024_ranks_and_servers(tmp_path: Path) -> None:
    assert [simulate(start(size, tmp_path)) for size in (8, 64, 1024)] == [pytest.approx(32)] * 3
