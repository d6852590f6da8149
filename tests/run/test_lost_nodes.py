"""Which devices of a trainer are lost, how long it waits for them, and in which layout it continues without them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from limits import HUNG_S

import allocation
from allocation import Cluster as Machines
from allocation.plan import Device
from areal_like.backends.ray.placement import Slot
from areal_like.run import lost_nodes
from areal_like.run.lost_nodes import find_layout, find_lost_devices, map_devices, regain, trainer_devices

FIRST, SECOND = Device(0, 0), Device(1, 0)


class FakeCluster:
    """Two nodes with a device each; `nodes` are those on which Ray has the bundles now."""

    def __init__(self, nodes: dict[int, str | None]) -> None:
        slots = {device: Slot(device.node, f"n{device.node}", f"h{device.node}", None) for device in (FIRST, SECOND)}
        self.placement = SimpleNamespace(slots=slots)
        self.nodes = nodes
        self.followed: list[Sequence[Device]] = []

    async def locate(self, device: Device) -> tuple[str, str] | None:
        node = self.nodes[device.node]
        return (node, f"http://{node}:1") if node else None

    async def follow(self, devices: Sequence[Device], *, uses_gpus: bool) -> None:
        slots = self.placement.slots
        for device in devices:
            slots[device] = replace(slots[device], node_id=self.nodes[device.node])
        self.followed.append(devices)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """URLs that do not answer."""
    urls: set[str] = set()

    async def accepts(url: str, limit_s: float) -> bool:
        return url not in urls

    monkeypatch.setattr(lost_nodes, "accepts", accepts)
    monkeypatch.setattr(lost_nodes, "POLL_S", 0.01)
    return urls


def test_a_device_is_lost_with_its_node_or_when_that_is_silent(silent: set[str]) -> None:
    def lost(nodes: dict[int, str | None]) -> list[Device]:
        cluster: Any = FakeCluster(nodes)
        return asyncio.run(find_lost_devices(cluster, [FIRST, SECOND], 1.0))

    assert lost({0: "n0", 1: "n1"}) == []
    assert lost({0: "n0", 1: None}) == [SECOND]
    assert lost({0: "n0", 1: "n7"}) == [SECOND]  # where Ray has moved it
    silent.add("http://n0:1")
    assert lost({0: "n0", 1: "n1"}) == [FIRST]


@pytest.mark.parametrize("returns", [True, False])
def test_a_trainer_waits_until_its_host_answers_or_ray_has_another_one(silent: set[str], returns: bool) -> None:
    silent.add("http://n1:1")
    cluster: Any = FakeCluster({0: "n0", 1: "n1"})
    said: list[str] = []

    async def run() -> None:
        waiting = asyncio.create_task(regain(cluster, [SECOND], 1.0, uses_gpus=False, say=said.append))
        while not said:
            await asyncio.sleep(0)
        assert not waiting.done()
        if returns:
            silent.clear()
        else:
            cluster.nodes[1] = "n9"
        await asyncio.wait_for(waiting, HUNG_S)

    asyncio.run(run())
    assert said == ["The trainer waits for host h1, or for another host with enough free resources."]
    assert cluster.followed == ([] if returns else [[SECOND]])


def job(trainer: str) -> Any:
    plan = allocation.compile(f"sglang:d1+{trainer}", cluster=Machines(4, 1))
    return SimpleNamespace(plan=plan, config=SimpleNamespace(roles={"actor": None}))


def test_the_first_layout_that_fits_on_what_is_left_is_used() -> None:
    devices = trainer_devices(job("megatron:d3"))
    two, one = job("megatron:t2"), job("megatron:d1")
    assert find_layout([two, one], devices, devices[:1]) == two
    assert find_layout([two, one], devices, devices[:2]) == one
    assert find_layout([two], devices, devices[:2]) is None
    assert dict(map_devices(two, devices, devices[:1])) == dict(zip(trainer_devices(two), devices[1:], strict=True))
