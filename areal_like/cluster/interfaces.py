"""The address at which a run's processes listen on each node (`cluster.interface`)."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from areal_like.cluster.placement import Placement, on_bundle, ray_errors
from areal_like.errors import ClusterError

if TYPE_CHECKING:
    from allocation.plan import Device
    from areal_like.cluster.placement import Slot

ANSWER_S = 120.0  # for a node's answer, which starts a process


async def use_interface(placement: Placement, interface: str | None) -> Placement:
    """Return a placement whose hosts are the addresses of an interface of each node; None means Ray's addresses.

    `interface` is a name, or a network such as `10.0.0.0/16`. Raises ClusterError about nodes without it.
    """
    return placement if interface is None else replace(placement, slots=await _choose_addresses(placement, interface))


async def _choose_addresses(placement: Placement, interface: str) -> Mapping[Device, Slot]:
    hosts = {slot.bundle: slot.host for slot in placement.slots.values()}
    found = dict(zip(hosts, await _ask(placement, hosts), strict=True))
    chosen = {bundle: choose(addresses, interface) for bundle, addresses in found.items()}
    if lacking := [
        f"node {host} has no address of cluster.interface={interface}. Its interfaces are {describe(found[bundle])}"
        for bundle, host in hosts.items()
        if chosen[bundle] is None
    ]:
        fix = "Set cluster.interface to an interface that all nodes have, or to the network of one, such as 10.0.0.0/16"
        raise ClusterError("\n  ".join([*lacking, fix]))
    return {device: replace(slot, host=str(chosen[slot.bundle])) for device, slot in placement.slots.items()}


def own_host(interface: str) -> str:
    """Return this host's address of an interface. Raises ClusterError if it has none."""
    addresses = _look_function()()
    if (address := choose(addresses, interface)) is None:
        raise ClusterError(
            f"this host has no address of cluster.interface={interface}, at which servers could download weights "
            f"(weight_update.url=auto). Its interfaces are {describe(addresses)}. Start the run on a host with that "
            "interface, or set weight_update.url to a web server"
        )
    return address


def own_address(fix: str) -> str:
    """Return the address by which other hosts reach this one.

    It is the Ray cluster's address of this host, else the default route's. Raises ClusterError, which ends with `fix`,
    on a host without a route.
    """
    import ray

    if ray.is_initialized() and not ipaddress.ip_address(address := ray.util.get_node_ip_address()).is_loopback:
        return str(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: the address is for documentation (RFC 5737)
        except OSError as error:
            raise ClusterError(f"this host has no route to others ({error.strerror}). {fix}") from error
        return str(probe.getsockname()[0])


def choose(addresses: Sequence[tuple[str, str]], interface: str) -> str | None:
    """Return the first IPv4 address, else the first IPv6 address, of an interface's name or of a network."""
    network = network_of(interface)
    fitting = [
        address
        for name, address in addresses
        if (ipaddress.ip_address(address) in network if network else name == interface)
    ]
    return min(fitting, key=lambda address: ":" in address, default=None)


def network_of(interface: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """Return the network that a text with `/` describes; None for the name of an interface. Raises ValueError."""
    return ipaddress.ip_network(interface, strict=False) if "/" in interface else None


def describe(addresses: Sequence[tuple[str, str]]) -> str:
    """Return the interfaces of a node with their addresses, for a message."""
    return ", ".join(f"{name} ({address})" for name, address in addresses) or "none but loopback"


async def _ask(placement: Placement, hosts: Mapping[int, str]) -> list[list[tuple[str, str]]]:
    """Return the interfaces of the node of each bundle, with their addresses."""
    import ray

    remote = ray.remote(_look_function())
    try:
        with ray_errors():
            asking = [on_bundle(remote, placement.group, bundle, max_retries=0).remote() for bundle in hosts]
            async with asyncio.timeout(ANSWER_S):
                return list(await asyncio.gather(*asking))
    except TimeoutError as error:
        nodes = ", ".join(hosts.values())
        raise ClusterError(f"not every node of {nodes} answered within {ANSWER_S:g} s") from error


def _look_function() -> Callable[[], list[tuple[str, str]]]:
    """Return a function that lists a host's interfaces; Ray sends it by value, because it is not at module level."""

    def look() -> list[tuple[str, str]]:
        import socket

        import psutil

        return [
            (name, each.address)
            for name, found in psutil.net_if_addrs().items()
            for each in found
            if each.family in (socket.AF_INET, socket.AF_INET6)
            and not each.address.startswith(("127.", "fe80:"))
            and each.address != "::1"
        ]

    return look
