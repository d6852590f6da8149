"""The nodes of a run before its processes start: what has to be alike on all of them, and what each has to have.

Ray lets nodes join whose packages, drivers or clocks differ; a run would fail later, in the words of a library.
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

from areal_like.cluster.placement import node_urls, ray_errors, url
from areal_like.cluster.ports import port_range
from areal_like.errors import ClusterError

if TYPE_CHECKING:
    from areal_like.cluster.placement import Placement

ANSWER_S = 120.0  # that a node has for its answer: it starts a process for it
CONNECT_S = 10.0  # that a node has for accepting a connection of another one
ASKED = 5  # times that each node is asked for its time; the fastest answer counts
CLOCK_S = 1.0  # by which clocks may differ
LEAST_DISK = 256 << 20  # free bytes of the directory for temporary files
LESS_MEMORY = 0.5  # of the node with the most free memory
_PACKAGES = (
    *("areal-like", "torch", "ray", "sglang", "transformers", "megatron-core", "mbridge", "megatron-bridge"),
    *("transformer-engine", "flash-attn", "numpy", "safetensors", "triton"),
)


@dataclass(frozen=True)
class Node:
    """What a node says of itself; `ahead_s` is its clock less this host's, `missing` the asked paths that it lacks.

    `unreachable` are the addresses of other nodes that it could not connect to, and `unreachable_ports` those with a
    port that the other node had just opened. `no_port` says why it could not open one itself, and `own_ports` is its
    kernel's range.
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
    own_ports: Sequence[int] = ()


async def check_nodes(
    placement: Placement, files: Mapping[str, Path], warn: Callable[[str], object], ports: str | None = None
) -> None:
    """Raise ClusterError about a node with which no run would succeed, and `warn` of other differences.

    `files` are the paths that every node reads, by the key that names each; `ports` is the run's range.
    """
    nodes = await _ask(placement, [str(path) for path in files.values()], ports)
    keys = {str(path): key for key, path in reversed(list(files.items()))}  # the first of those that share a path
    if wrong := [*_different_software(nodes), *_closed_ports(nodes, ports), *_lacks(nodes, keys)]:
        raise ClusterError("\n  ".join(wrong))
    for difference in [*differences(nodes), *_other_ports(nodes, ports)]:
        warn(difference)


def _different_software(nodes: Sequence[Node]) -> Iterator[str]:
    rule = "All nodes of a run exchange Python objects and tensors. Install the same versions, or use one image"
    if text := _by_value(nodes, lambda node: node.python.rpartition(".")[0]):
        yield f"the nodes have different versions of Python: {text}. {rule}"
    for package in dict.fromkeys(package for node in nodes for package in node.packages):
        if text := _by_value(nodes, partial(_version, package)):
            yield f"the nodes have different versions of {package}: {text}. {rule}"


def _version(package: str, node: Node) -> str:
    return node.packages.get(package) or "none"


def _closed_ports(nodes: Sequence[Node], ports: str | None) -> Iterator[str]:
    opened = f"of cluster.ports={ports}" if ports else "that was free"
    fix = (
        f"Open the ports {ports} in the firewall between them"
        if ports
        else "Open the firewall between them, or set cluster.ports to a range that it lets pass"
    )
    for node in nodes:
        if node.no_port:
            yield (
                f"node {node.host} cannot open a port {opened} at its address: {node.no_port}. Set cluster.ports to a range "
                "with free ports on every node, and start Ray there with --node-ip-address set to an address of the node"
            )
        for address in node.unreachable_ports:
            if urlsplit(f"//{address}").hostname not in node.unreachable:  # which is reported anyway
                yield f"node {node.host} cannot connect to {address}, a port {opened}. {fix}"


def _other_ports(nodes: Sequence[Node], ports: str | None) -> Iterator[str]:
    """Yield nodes whose kernel gives gloo and NCCL ports outside of the run's range."""
    allowed = port_range(ports) if ports else range(0)
    for node in nodes if ports else ():
        if node.own_ports and not set(node.own_ports) <= set(allowed):
            first, last = node.own_ports
            yield (
                f"gloo and NCCL on node {node.host} use ports {first}-{last} (net.ipv4.ip_local_port_range), which are not in "
                f"cluster.ports={ports}. If a firewall blocks them, set `sysctl net.ipv4.ip_local_port_range` to that range"
            )


def _lacks(nodes: Sequence[Node], keys: Mapping[str, str]) -> Iterator[str]:
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


def differences(nodes: Sequence[Node]) -> Iterator[str]:
    """Yield differences with which a run works, though perhaps not as intended."""
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


def _by_value(nodes: Sequence[Node], value: Callable[[Node], str]) -> str:
    """Return which nodes have which value, or nothing where all have the same."""
    hosts: dict[str, list[str]] = {}
    for node in nodes:
        hosts.setdefault(value(node), []).append(node.host)
    return "" if len(hosts) < 2 else "; ".join(f"{each} on {', '.join(found)}" for each, found in hosts.items())


async def _ask(placement: Placement, paths: Sequence[str], ports: str | None) -> list[Node]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    hosts = {slot.bundle: slot.host for slot in placement.slots.values()}
    with ray_errors():
        urls = [found for host, found in (await node_urls()).items() if host in hosts.values()]
    strategies = (PlacementGroupSchedulingStrategy(placement.group, bundle) for bundle in hosts)
    actor: Any = ray.remote(_probe_class())
    probes = [actor.options(num_cpus=0, max_restarts=0, scheduling_strategy=each).remote() for each in strategies]
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
                return [replace(node, no_port=why) for node, (_, (_, why)) in zip(found, opened, strict=True)]
    except TimeoutError as error:
        raise ClusterError(f"not every node of {', '.join(hosts.values())} answered within {ANSWER_S:g} s") from error
    finally:
        for probe in probes:
            with suppress(Exception):  # it has ended with its node or with Ray
                ray.kill(probe)


async def _node(probe: Any, host: str, paths: Sequence[str], urls: Sequence[str], listeners: Sequence[str]) -> Node:
    facts, closed = await asyncio.gather(
        probe.facts.remote(_PACKAGES, paths), probe.find_unreachable.remote([*urls, *listeners], CONNECT_S)
    )
    return Node(
        host=host,
        ahead_s=await _ahead(probe.now.remote),
        unreachable=[str(urlsplit(each).hostname) for each in closed if each in urls],
        unreachable_ports=[urlsplit(each).netloc for each in closed if each in listeners],
        **facts,
    )


async def _ahead(now: Callable[[], Awaitable[float]]) -> float:
    """Return by how much another host's clock is ahead, as exact as half of the fastest answer's time."""
    answers = []
    for _ in range(ASKED):
        asked = time.time()
        there = await now()
        answered = time.time()
        answers.append((answered - asked, there - (asked + answered) / 2))
    return min(answers)[1]


def _probe_class() -> type:
    """A class that Ray sends by value: it needs nothing of this package on the node."""

    class Probe:
        def now(self) -> float:
            import time

            return time.time()

        def open_port(self, host: str, ports: Sequence[int]) -> tuple[int, str]:
            """Listen at one of the ports until this process ends; return it, or 0 and why none can be opened."""
            import socket

            why = ""
            for port in ports:
                try:
                    self.listener = socket.create_server(
                        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024
                    )
                except OSError as error:
                    why = str(error.strerror)
                else:
                    return self.listener.getsockname()[1], ""
            return 0, why

        def find_unreachable(self, urls: Sequence[str], limit_s: float) -> list[str]:
            import socket
            from concurrent.futures import ThreadPoolExecutor
            from urllib.parse import urlsplit

            def reaches(url: str) -> bool:
                address = urlsplit(url)
                try:
                    socket.create_connection((address.hostname, address.port), limit_s).close()
                except OSError:
                    return False
                return True

            with ThreadPoolExecutor(32) as threads:
                reached = list(threads.map(reaches, urls))
            return [url for url, is_reached in zip(urls, reached, strict=True) if not is_reached]

        def facts(self, packages: Sequence[str], paths: Sequence[str]) -> dict[str, Any]:
            import os
            import platform
            import shutil
            import subprocess
            import tempfile
            from importlib.metadata import PackageNotFoundError, version

            def find_version(name: str) -> str | None:
                try:
                    return version(name)
                except PackageNotFoundError:
                    return None

            shown: list[list[str]] = []
            if program := shutil.which("nvidia-smi"):
                command = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
                told = subprocess.run(command, capture_output=True, text=True, timeout=60)
                shown = [line.split(", ") for line in told.stdout.splitlines() if told.returncode == 0]
            with open("/proc/meminfo") as file:
                memory = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in file)}
            try:
                with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
                    own_ports = [int(word) for word in file.read().split()]
            except OSError:  # a system without it chooses as it likes
                own_ports = []
            temporary = tempfile.gettempdir()
            return {
                "python": platform.python_version(),
                "packages": {name: find_version(name) for name in packages},
                "gpus": sorted({each[0] for each in shown}),
                "drivers": sorted({each[-1] for each in shown}),
                "free_memory": memory["MemAvailable"],
                "free_disk": shutil.disk_usage(temporary).free,
                "temporary": temporary,
                "own_ports": own_ports,
                "missing": [path for path in paths if not os.path.exists(path)],
            }

    return Probe
