"""Which address of a node `cluster.interface` chooses, and what is said where a node has none."""

from __future__ import annotations

import asyncio

import pytest

from allocation import Device
from areal_like.backends.ray import interfaces
from areal_like.backends.ray.interfaces import choose, own_host, use_interface
from areal_like.backends.ray.placement import Placement, Slot
from areal_like.core.config.findings import ConfigError
from areal_like.core.config.load import load
from areal_like.core.errors import ClusterError

NODE = [("eth0", "10.0.0.7"), ("ib0", "fd00::7"), ("ib0", "10.20.0.7"), ("v6", "2001:db8::7")]


@pytest.mark.parametrize(
    ("interface", "address"),
    [
        ("eth0", "10.0.0.7"),
        ("ib0", "10.20.0.7"),
        ("v6", "2001:db8::7"),
        ("10.20.0.0/16", "10.20.0.7"),
        ("10.20.0.7/16", "10.20.0.7"),
        ("fd00::/8", "fd00::7"),
        ("ib", None),
        ("10.30.0.0/16", None),
    ],
)
def test_an_interface_is_chosen_by_its_name_or_by_its_network(interface: str, address: str | None) -> None:
    assert choose(NODE, interface) == address


def test_a_node_without_the_interface_is_named_with_those_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(*_: object) -> list[list[tuple[str, str]]]:
        return [NODE, [("eth0", "10.0.0.8")]]

    monkeypatch.setattr(interfaces, "_ask", ask)
    slots = {Device(node, 0): Slot(node, f"id{node}", f"10.0.0.{7 + node}", None) for node in range(2)}
    placement = Placement(None, slots)  # type: ignore[arg-type]
    chosen = asyncio.run(use_interface(placement, "10.0.0.0/24"))
    assert [slot.host for slot in chosen.slots.values()] == ["10.0.0.7", "10.0.0.8"]
    assert asyncio.run(use_interface(placement, None)) is placement
    with pytest.raises(ClusterError) as refused:
        asyncio.run(use_interface(placement, "ib0"))
    assert str(refused.value).splitlines() == [
        "node 10.0.0.8 has no address of cluster.interface=ib0. Its interfaces are eth0 (10.0.0.8)",
        "  Set cluster.interface to an interface that all nodes have, or to the network of one, such as 10.0.0.0/16",
    ]


def test_the_file_server_listens_at_the_controllers_address_of_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "_look_function", lambda: lambda: NODE)
    assert own_host("10.20.0.0/16") == "10.20.0.7"
    with pytest.raises(ClusterError, match=r"no address of cluster\.interface=ib1, .*ib0 \(10\.20\.0\.7\)"):
        own_host("ib1")


def test_a_text_that_is_no_network_is_refused(write) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.interface"):
        load(write(), ["cluster.interface=10.0.0/99"])
