"""Checks of a run's nodes before its processes start: packages and devices that must be equal, and paths that each node
needs.

Ray accepts nodes whose packages, drivers or clocks differ; a run would fail later, with a library's error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from areal_like.backends.ray import node_probe
from areal_like.backends.ray.node_probe import NodeProbe
from areal_like.backends.ray.placement import node_urls, on_bundle, ray_errors, url
from areal_like.core.errors import ClusterError
from areal_like.runtime.ports import port_range

if TYPE_CHECKING:
    from areal_like.backends.ray.placement import Placement

ANSWER_S = 120.0  # for a node's answer, which starts a process
CONNECT_S = 10.0  # for a node to accept a connection from another node
ASKED = 5  # queries of each node's clock; the fastest answer counts
CLOCK_S = 1.0  # maximum difference of clocks
LEAST_DISK = 256 << 20  # free bytes of the directory for temporary files
LESS_MEMORY = 0.5  # share of the largest free memory of a node
_PACKAGES = (
    *("areal-like", "torch", "ray", "sglang", "transformers", "megatron-core", "mbridge", "megatron-bridge"),
    *("transformer-engine", "flash-attn", "numpy", "safetensors", "triton"),
)


@dataclass(frozen=True)
class NodeReport:
    """A node's report about itself; `ahead_s` is its clock minus this host's, `missing` lists absent paths.

    `unreachable` lists the addresses of other nodes that it could not connect to, and `unreachable_ports` the
    addresses with a port that the other node had just opened. `no_port` is the reason why it could not open a port
    itself, `far_from_here` is the address of a port that it opened and the controller could not reach, and `own_ports`
    is its kernel's range.
    """

    host: str
    python: str
    packages: Mapping[str, str | None]
    gpus: Sequence[str]
    drivers: Sequence[str]
    free_memory: int
    free_disk: int
    temporary: str
    missing: Sequence[str]
    ahead_s: float
    unreachable: Sequence[str] = ()
    unreachable_ports: Sequence[str] = ()
    no_port: str = ""
    far_from_here: str = ""
    own_ports: Sequence[int] = ()


async def check_nodes(
    placement: Placement,
    files: Mapping[str, Path],
    warn: Callable[[str], object],
    ports: str | None = None,
    interface: str | None = None,
) -> None:
    """Raise ClusterError about a node with which the run would fail, and `warn` of other differences.

    `files` has the paths that every node reads, by their keys; `ports` is the run's range, and `interface` has the
    addresses at which the nodes listen.
    """
    nodes = await _ask(placement, [str(path) for path in files.values()], ports)
    keys = {str(path): key for key, path in reversed(list(files.items()))}  # the first key of each path
    if wrong := [*_different_software(nodes), *_closed_ports(nodes, ports, interface), *_lacks(nodes, keys)]:
        raise ClusterError("\n  ".join(wrong))
    for difference in [*differences(nodes), *_other_ports(nodes, ports)]:
        warn(difference)


def _different_software(nodes: Sequence[NodeReport]) -> Iterator[str]:
    rule = "All nodes of a run exchange Python objects and tensors. Install the same versions, or use one image"
    if text := _by_value(nodes, lambda node: node.python.rpartition(".")[0]):
        yield f"the nodes have different versions of Python: {text}. {rule}"
    for package in dict.fromkeys(package for node in nodes for package in node.packages):
        if text := _by_value(nodes, partial(_version, package)):
            yield f"the nodes have different versions of {package}: {text}. {rule}"


def _version(package: str, node: NodeReport) -> str:
    return node.packages.get(package) or "none"


def _closed_ports(nodes: Sequence[NodeReport], ports: str | None, interface: str | None) -> Iterator[str]:
    opened = f"of cluster.ports={ports}" if ports else "that was free"
    fix = _way_to_connect(ports, interface)
    for node in nodes:
        if node.no_port:
            yield (
                f"node {node.host} cannot open a port {opened} at its address: {node.no_port}. Set cluster.ports to a range "
                "with free ports on every node, and start Ray there with --node-ip-address set to an address of the node"
            )
        for address in node.unreachable_ports:
            if urlsplit(f"//{address}").hostname not in node.unreachable:  # reported anyway
                yield f"node {node.host} cannot connect to {address}, a port {opened}. {fix}"
        if node.far_from_here:
            yield f"this host, which has the controller, cannot connect to {node.far_from_here}, a port {opened}. {fix}"


def _way_to_connect(ports: str | None, interface: str | None) -> str:
    if interface:
        return (
            f"The nodes listen at the addresses of cluster.interface={interface}. Set it to an interface of a network that "
            "connects all hosts of the run, or open the firewall between them"
        )
    if ports:
        return f"Open the ports {ports} in the firewall between them"
    return "Open the firewall between them, or set cluster.ports to a range that it lets pass"


def _other_ports(nodes: Sequence[NodeReport], ports: str | None) -> Iterator[str]:
    """Yield nodes whose kernel assigns ports outside the run's range to gloo and NCCL."""
    allowed = port_range(ports) if ports else range(0)
    for node in nodes if ports else ():
        if node.own_ports and not set(node.own_ports) <= set(allowed):
            first, last = node.own_ports
            yield (
                f"gloo and NCCL on node {node.host} use ports {first}-{last} (net.ipv4.ip_local_port_range), which are not in "
                f"cluster.ports={ports}. If a firewall blocks them, set `sysctl net.ipv4.ip_local_port_range` to that range"
            )


def _lacks(nodes: Sequence[NodeReport], keys: Mapping[str, str]) -> Iterator[str]:
    for node in nodes:
        for address in node.unreachable:
            yield (
                f"node {node.host} cannot connect to node {address}. All nodes of a run connect to each other, at free "
                "ports too. Open the firewall between them, or start Ray on both with --node-ip-address set to an address "
                "that the others reach"
            )
        for path in node.missing:
            yield (
                f"node {node.host} does not have {path} ({keys[path]}), which every node reads. Copy it there, or set "
                f"{keys[path]} to a path on a file system that all nodes share"
            )
        if node.free_disk < LEAST_DISK:
            yield (
                f"node {node.host} has {node.free_disk >> 20} MiB free in {node.temporary}, and a run needs at least "
                f"{LEAST_DISK >> 20} MiB for temporary files. Free space there, or set TMPDIR on the node"
            )


def differences(nodes: Sequence[NodeReport]) -> Iterator[str]:
    """Yield differences with which a run works, but perhaps not as intended."""
    for what, value in (
        ("GPUs", lambda node: " ".join(node.gpus) or "none"),
        ("NVIDIA drivers", lambda node: " ".join(node.drivers) or "none"),
        ("patch versions of Python", lambda node: node.python),
    ):
        if text := _by_value(nodes, value):
            yield f"the nodes have different {what}: {text}"
    most = max(node.free_memory for node in nodes)
    for node in nodes:
        if node.free_memory < LESS_MEMORY * most:
            yield f"node {node.host} has {node.free_memory >> 30} GiB of free memory, another node has {most >> 30} GiB"
        if abs(node.ahead_s) > CLOCK_S:
            side = "ahead of" if node.ahead_s > 0 else "behind"
            yield (
                f"the clock of node {node.host} is {abs(node.ahead_s):.1f} s {side} this host's, so times in the "
                "report are wrong by that. Synchronise the clocks (NTP)"
            )


def _by_value(nodes: Sequence[NodeReport], value: Callable[[NodeReport], str]) -> str:
    """Return which nodes have which value, "" if all are equal."""
    hosts: dict[str, list[str]] = {}
    for node in nodes:
        hosts.setdefault(value(node), []).append(node.host)
    return "" if len(hosts) < 2 else "; ".join(f"{each} on {', '.join(found)}" for each, found in hosts.items())


async def _ask(placement: Placement, paths: Sequence[str], ports: str | None) -> list[NodeReport]:
    import ray
    from ray.cloudpickle import register_pickle_by_value

    hosts = {slot.bundle: slot.host for slot in placement.slots.values()}
    nodes = {slot.node_id for slot in placement.slots.values()}
    with ray_errors():
        urls = [found for node, found in (await node_urls()).items() if node in nodes]
    register_pickle_by_value(node_probe)  # the node may lack this package or have another version
    actor: Any = ray.remote(NodeProbe)
    probes = [on_bundle(actor, placement.group, bundle, max_restarts=0).remote() for bundle in hosts]
    try:
        with ray_errors():
            async with asyncio.timeout(ANSWER_S):
                opening = (
                    probe.open_port.remote(host, list(port_range(ports)) if ports else [0])
                    for probe, host in zip(probes, hosts.values(), strict=True)
                )
                opened = list(zip(hosts.values(), await asyncio.gather(*opening), strict=True))
                listeners = [url(host, port) for host, (port, _) in opened if port]
                asking = (
                    _node(probe, host, paths, urls, listeners)
                    for probe, host in zip(probes, hosts.values(), strict=True)
                )
                found = await asyncio.gather(*asking)
                far = await asyncio.to_thread(NodeProbe().find_unreachable, listeners, CONNECT_S)
                far_by_host = {str(urlsplit(each).hostname): urlsplit(each).netloc for each in far}
                return [
                    replace(node, no_port=why, far_from_here=far_by_host.get(node.host, ""))
                    for node, (_, (_, why)) in zip(found, opened, strict=True)
                ]
    except TimeoutError as error:
        raise ClusterError(f"not every node of {', '.join(hosts.values())} answered within {ANSWER_S:g} s") from error
    finally:
        for probe in probes:
            with suppress(Exception):  # the actor has ended with its node or with Ray
                ray.kill(probe)


async def _node(
    probe: Any, host: str, paths: Sequence[str], urls: Sequence[str], listeners: Sequence[str]
) -> NodeReport:
    facts, closed = await asyncio.gather(
        probe.facts.remote(_PACKAGES, paths), probe.find_unreachable.remote([*urls, *listeners], CONNECT_S)
    )
    return NodeReport(
        host=host,
        ahead_s=await _ahead(probe.now.remote),
        unreachable=[str(urlsplit(each).hostname) for each in closed if each in urls],
        unreachable_ports=[urlsplit(each).netloc for each in closed if each in listeners],
        **facts,
    )


async def _ahead(now: Callable[[], Awaitable[float]]) -> float:
    """Return by how much another host's clock is ahead, exact to half of the fastest round trip."""
    answers = []
    for _ in range(ASKED):
        asked = time.time()
        there = await now()
        answered = time.time()
        answers.append((answered - asked, there - (asked + answered) / 2))
    return min(answers)[1]
