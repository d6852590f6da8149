"""Plan devices onto Ray: one placement group, one bundle per node of the plan, so that a node stays a node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from areal_like.errors import ClusterError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from allocation import Device

GPU_IDS_S = 10.0  # that nodes have at least for saying which GPUs were granted, however late that was


@dataclass(frozen=True)
class Slot:
    """Where a plan device really is. `gpu` is its id for CUDA_VISIBLE_DEVICES, None for a slot on a CPU machine."""

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
    devices: Collection[Device], *, uses_gpus: bool, elastic: bool, timeout_s: float
) -> AsyncIterator[Placement]:
    """Hold a slot for every distinct device; devices of one plan node share one Ray node.

    Waits `timeout_s` seconds for resources; not at all for those that the cluster lacks, unless it is `elastic`.
    Raises ClusterError with what was asked and what there is.
    """
    import ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    nodes = sorted({device.node for device in devices})
    on_node = [
        sorted({device for device in devices if device.node == node}, key=lambda device: device.gpu) for node in nodes
    ]
    unit = ("CPU", "GPU") if uses_gpus else ("CPU",)
    bundles: list[dict[str, float]] = [dict.fromkeys(unit, float(len(members))) for members in on_node]
    if not elastic and not _fits(bundles):
        raise ClusterError(_shortage(bundles, "this machine has too little"))
    group = placement_group(bundles, strategy="SPREAD")
    try:
        deadline = time.monotonic() + timeout_s
        while not await asyncio.to_thread(group.wait, 0.5):
            if time.monotonic() > deadline:
                raise ClusterError(
                    _shortage(bundles, f"not granted within {timeout_s:g} s (scheduler.startup_timeout_s)")
                )
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        node_ids = placement_group_table(group)["bundles_to_node_id"]
        gpus = await _gpu_ids(group, on_node, deadline) if uses_gpus else [[None] * len(part) for part in on_node]
        slots = {
            device: Slot(bundle, node_ids[bundle], hosts[node_ids[bundle]], gpu)
            for bundle, part in enumerate(on_node)
            for device, gpu in zip(part, gpus[bundle], strict=True)
        }
        yield Placement(group, slots)
    finally:
        if elastic:  # a private cluster ends with its groups, and may be dead already
            remove_placement_group(group)


async def _gpu_ids(group: PlacementGroup, on_node: list[list[Device]], deadline: float) -> list[list[str]]:
    """Which GPUs Ray reserved in each bundle; only a task that holds all of a bundle can tell. Raises ClusterError."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def ask() -> list[str]:
        return sorted((str(gpu) for gpu in ray.get_gpu_ids()), key=lambda gpu: (len(gpu), gpu))

    asking = [
        ray.remote(ask)
        .options(
            num_cpus=0,
            num_gpus=len(members),
            max_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        )
        .remote()
        for bundle, members in enumerate(on_node)
    ]
    limit_s = max(GPU_IDS_S, deadline - time.monotonic())
    try:
        async with asyncio.timeout(limit_s):
            return await asyncio.gather(*asking)
    except TimeoutError as error:
        raise ClusterError(
            f"the plan's nodes did not say within {limit_s:.0f} s which of their GPUs are granted"
        ) from error
    except RayError as error:
        raise ClusterError(f"a node of the plan did not say which of its GPUs are granted: {error}") from error


def _fits(bundles: list[dict[str, float]]) -> bool:
    """Whether one node, which a private cluster is, holds all bundles."""
    import ray

    total = ray.cluster_resources()
    return all(sum(bundle[name] for bundle in bundles) <= total.get(name, 0) for name in bundles[0])


def _shortage(bundles: list[dict[str, float]], reason: str) -> str:
    import ray

    def show(resources: Mapping[str, float]) -> str:
        return ", ".join(f"{resources.get(name, 0):g} {name}" for name in bundles[0])

    asked = "; ".join(f"node {index}: {show(bundle)}" for index, bundle in enumerate(bundles))
    there = "; ".join(
        f"{node['NodeManagerAddress']}: {show(node['Resources'])}" for node in ray.nodes() if node["Alive"]
    )
    return (
        f"the plan's resources were refused, {reason}\n  the plan asks for {asked}\n  the cluster has {there}\n"
        f"  free now: {show(ray.available_resources())}"
    )
