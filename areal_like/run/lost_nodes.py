"""Nodes that a trainer has lost: finds them, and waits until its devices are in the cluster again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from areal_like.backends.ray.heartbeat import accepts

if TYPE_CHECKING:
    from allocation.plan import Device
    from areal_like.backends.ray.run import RunCluster
    from areal_like.job import Job

POLL_S = 1.0


def trainer_devices(job: Job) -> list[Device]:
    """Return the devices of all trainer ranks, node by node."""
    return sorted({device for role in job.config.roles for device in job.plan.engine(role).devices})


async def find_lost_devices(cluster: RunCluster, devices: Sequence[Device], answer_s: float) -> list[Device]:
    """Return the devices whose node has left the cluster or does not answer."""
    groups = _by_node(cluster, devices)
    there = await asyncio.gather(*(_is_there(cluster, part[0], answer_s) for part in groups))
    return [device for part, is_there in zip(groups, there, strict=True) if not is_there for device in part]


async def regain(
    cluster: RunCluster, devices: Sequence[Device], answer_s: float, *, uses_gpus: bool, say: Callable[[str], None]
) -> None:
    """Wait without a limit until the node of each device answers: the same one, or one onto which Ray has moved it."""
    for part in _by_node(cluster, devices):
        slot = cluster.placement.slots[part[0]]
        if not await _answers_now(cluster, part[0], answer_s):
            say(f"The trainer waits for host {slot.host}, or for another host with enough free resources.")
            while not await _answers_now(cluster, part[0], answer_s):
                await asyncio.sleep(POLL_S)
        if not await _is_there(cluster, part[0], answer_s):
            await cluster.follow(part, uses_gpus=uses_gpus)


def find_layout(layouts: Sequence[Job], devices: Sequence[Device], lost: Collection[Device]) -> Job | None:
    """Return the first job whose trainer fits on the devices that are not lost."""
    left = len(devices) - len(set(lost))
    return next((job for job in layouts if len(trainer_devices(job)) <= left), None)


def map_devices(job: Job, devices: Sequence[Device], lost: Collection[Device]) -> Mapping[Device, Device]:
    """Return for each device of a layout's trainer one that is left, in order: neighbours stay on one node."""
    left = [device for device in devices if device not in lost]
    return dict(zip(trainer_devices(job), left, strict=False))


async def _is_there(cluster: RunCluster, device: Device, answer_s: float) -> bool:
    """Return whether a device is still on the node that it was on, and the node answers."""
    node = await cluster.locate(device)
    same = node is not None and node[0] == cluster.placement.slots[device].node_id
    return same and node is not None and await accepts(node[1], answer_s)


async def _answers_now(cluster: RunCluster, device: Device, answer_s: float) -> bool:
    node = await cluster.locate(device)
    return node is not None and await accepts(node[1], answer_s)


def _by_node(cluster: RunCluster, devices: Sequence[Device]) -> list[list[Device]]:
    slots = cluster.placement.slots
    bundles = dict.fromkeys(slots[device].bundle for device in devices)
    return [[device for device in devices if slots[device].bundle == bundle] for bundle in bundles]
