"""Placement of a plan's devices on Ray: one placement group with one bundle per plan node, which keeps nodes whole."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from areal_like.backends.ray.bundles import bundles, cluster_resources, fits, names_gpus, node_devices, shortage
from areal_like.backends.ray.head import head_answers
from areal_like.core.errors import ClusterError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from allocation.plan import Device, Plan

GPU_IDS_S = 60.0  # minimum time for nodes to report the granted GPUs, however late the grant was
SOON_S, SELDOM_S = 5.0, 10.0  # time until a long wait is reported, and then between two queries


@dataclass(frozen=True)
class Slot:
    """The actual location of a plan device. `gpu` is its id for CUDA_VISIBLE_DEVICES, None on a CPU machine.

    `host` is the node's address at which the run's processes listen.
    """

    bundle: int
    node_id: str
    host: str
    gpu: str | None


@dataclass(frozen=True)
class Placement:
    """The run's placement group and the slot of every plan device."""

    group: PlacementGroup
    slots: Mapping[Device, Slot]


@asynccontextmanager
async def place(
    plan: Plan, *, uses_gpus: bool, elastic: bool, timeout_s: float, say: Callable[[str], None] | None = None
) -> AsyncIterator[Placement]:
    """Reserve a slot for every device of the plan; devices of one plan node share one Ray node.

    If the allocation names GPUs with `@`, GPU g of a plan node is the g-th GPU of the Ray node; otherwise any free GPUs
    are used. Waits up to `timeout_s` seconds for resources, and reports a long wait to `say`; does not wait for
    resources that the cluster lacks, unless it is `elastic`. Raises ClusterError with the requested and the available
    resources, and if Ray fails.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    asked = bundles(plan, uses_gpus=uses_gpus)
    if not elastic and not fits(asked, [ray.cluster_resources()], spread=False):
        raise ClusterError(_describe_refusal(asked, "this machine has too little"))
    with ray_errors():
        group = placement_group(asked, strategy="STRICT_SPREAD" if names_gpus(plan) and uses_gpus else "SPREAD")
        try:
            deadline = time.monotonic() + timeout_s
            await _wait_for_grant(group, asked, timeout_s, say)
            granted = await _granted_gpus(group, dict(enumerate(asked)), deadline) if uses_gpus else None
            yield Placement(group, _slots(plan, group, granted))
        finally:
            # a private cluster ends with its groups and may be dead already
            if elastic and await head_answers():
                remove_placement_group(group)


@contextmanager
def ray_errors() -> Iterator[None]:
    """Raise errors of Ray, such as a timeout, as ClusterError."""
    from ray.exceptions import RayError

    try:
        yield
    except RayError as error:
        raise ClusterError(f"Ray failed: {str(error).strip() or type(error).__name__}") from error


async def _wait_for_grant(
    group: PlacementGroup, asked: Sequence[Mapping[str, float]], timeout_s: float, say: Callable[[str], None] | None
) -> None:
    """Wait until all resources are granted; raise ClusterError after the limit."""
    start, pause_s = time.monotonic(), 0.0
    while not await asyncio.to_thread(group.wait, 0.5):
        if time.monotonic() > start + timeout_s:
            raise ClusterError(
                _describe_refusal(asked, f"not granted within {timeout_s:g} s (scheduler.startup_timeout_s)")
            )
        if say and time.monotonic() > start + SOON_S:
            say(shortage(asked, cluster_resources(), "it"))
            say, pause_s = None, SELDOM_S
        await asyncio.sleep(pause_s)


def _slots(plan: Plan, group: PlacementGroup, granted: Mapping[int, Mapping[int, str]] | None) -> dict[Device, Slot]:
    """Return each device's slot, with one of the GPUs `granted` in its bundle. Raises ClusterError."""
    exact = names_gpus(plan)
    slots: dict[Device, Slot] = {}
    nodes = _nodes_of(group)
    for bundle, part in enumerate(node_devices(plan)):
        if bundle not in nodes:
            raise ClusterError("a node was lost as soon as it had been granted")
        node_id, host = nodes[bundle]
        gpus = _choose(part, granted[bundle], host, exact=exact) if granted is not None else [None] * len(part)
        slots |= {device: Slot(bundle, node_id, host, gpu) for device, gpu in zip(part, gpus, strict=True)}
    return slots


def node_of(group: PlacementGroup, bundle: int) -> tuple[str, str] | None:
    """Return id and address of the living node that has a bundle, None if there is none."""
    return _nodes_of(group).get(bundle)


def _nodes_of(group: PlacementGroup) -> dict[int, tuple[str, str]]:
    """Return id and address of each placed bundle's living node, in two round trips to Ray."""
    import ray
    from ray.util.placement_group import placement_group_table

    nodes = placement_group_table(group)["bundles_to_node_id"]
    hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return {bundle: (node, hosts[node]) for bundle, node in nodes.items() if node in hosts}


def on_bundle(remote: Any, group: PlacementGroup, bundle: int, **options: Any) -> Any:
    """Return a remote function or class for one bundle, without CPUs.

    Callers create `remote` once for all bundles, because Ray exports each one in a separate round trip.
    """
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return remote.options(num_cpus=0, scheduling_strategy=strategy, **options)


async def node_lives(node_id: str) -> bool:
    """Return whether Ray considers a node alive."""
    import ray

    nodes = await asyncio.to_thread(ray.nodes)
    return any(node["NodeID"] == node_id and node["Alive"] for node in nodes)


async def node_urls() -> dict[str, str]:
    """Return the URL of the Ray process (raylet) of every living node, by the node's id."""
    import ray

    nodes = [node for node in await asyncio.to_thread(ray.nodes) if node["Alive"]]
    return {node["NodeID"]: url(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in nodes}


def url(host: str, port: int) -> str:
    """Return the URL of a port, with brackets around an IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def moved_slots(placement: Placement, devices: Sequence[Device], *, uses_gpus: bool) -> dict[Device, Slot]:
    """Wait until Ray has moved a lost node's reservation to another node; return the slots of `devices` there.

    Raises ClusterError.
    """
    lost = placement.slots[devices[0]]
    with ray_errors():
        while (node := await asyncio.to_thread(node_of, placement.group, lost.bundle)) is None:
            await asyncio.sleep(SOON_S)
        part = sorted(device for device, slot in placement.slots.items() if slot.bundle == lost.bundle)
        gpus: Sequence[str | None] = [None] * len(part)
        if uses_gpus:
            asked = {lost.bundle: placement.group.bundle_specs[lost.bundle]}
            granted = (await _granted_gpus(placement.group, asked, time.monotonic()))[lost.bundle]
            gpus = _choose(part, granted, node[1], exact=len(granted) > len(part))
    slots = {device: Slot(lost.bundle, *node, gpu) for device, gpu in zip(part, gpus, strict=True)}
    return {device: slots[device] for device in devices}


def _choose(part: Sequence[Device], granted: Mapping[int, str], host: str, *, exact: bool) -> list[str]:
    """Return each device's GPU id among those granted on its node. Raises ClusterError."""
    if not exact:
        return list(granted.values())
    if any(device.gpu not in granted for device in part):
        asked, got = (", ".join(map(str, indices)) for indices in ([device.gpu for device in part], granted))
        raise ClusterError(
            f"the allocation requests GPUs {asked} of a node with `@`, and Ray granted GPUs {got} of {host}: other jobs"
            " hold the rest. Wait for these jobs, or leave out `@`"
        )
    return [granted[device.gpu] for device in part]


async def _granted_gpus(
    group: PlacementGroup, asked: Mapping[int, Mapping[str, float]], deadline: float
) -> dict[int, dict[int, str]]:
    """Return the GPUs that Ray reserved in each bundle of `asked`, by position among the node's GPUs.

    Only a task that holds the whole bundle can find out. Raises ClusterError.
    """
    import ray
    from ray.exceptions import RayError

    def ask() -> dict[int, str]:
        # Ray counts the GPUs visible to its node process, and uses their ids there.
        visible = psutil.Process(os.getppid()).environ().get("CUDA_VISIBLE_DEVICES")
        order = visible.split(",") if visible else None
        granted = [str(gpu) for gpu in ray.get_gpu_ids()]
        return dict(sorted((order.index(gpu) if order else int(gpu), gpu) for gpu in granted))

    remote = ray.remote(ask)
    asking = [
        on_bundle(remote, group, index, num_gpus=bundle["GPU"], max_retries=0).remote()
        for index, bundle in asked.items()
    ]
    limit_s = max(GPU_IDS_S, deadline - time.monotonic())
    try:
        async with asyncio.timeout(limit_s):
            return dict(zip(asked, await asyncio.gather(*asking), strict=True))
    except TimeoutError as error:
        raise ClusterError(
            f"the plan's nodes did not report within {limit_s:.0f} s which of their GPUs are granted"
        ) from error
    except RayError as error:
        raise ClusterError(f"a node of the plan did not report which of its GPUs are granted: {error}") from error


def _describe_refusal(asked: Sequence[Mapping[str, float]], reason: str) -> str:
    return f"the plan's resources were refused, {reason}\n  {shortage(asked, cluster_resources())}"
