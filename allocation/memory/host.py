"""Host memory of each node, from the shapes alone: processes, offloaded state, checkpoint copies, data in flight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from allocation.backends import BACKENDS, SERVER
from allocation.hardware import GIB
from allocation.memory.items import AT_REST, Footprint
from allocation.model_spec import ModelSpec
from allocation.plan import EnginePlan
from allocation.settings import Workload

# Private bytes of a process with its imports, before it has a model: the controller with Ray's processes, a trainer
# rank, a server with its three processes. Measured on a CPU host (docs/memory_and_planning.md), and rounded up.
CONTROLLER_BYTES, RANK_BYTES, SERVER_BYTES = (int(gib * GIB) for gib in (1.0, 0.6, 1.1))
TRAJECTORY = 12  # bytes of a token: id, log-prob and version
BATCH = 36  # and of a token in the batch that trainer ranks receive, with advantages, masks and log-probs
OFFLOADED = {"weights": "param_offload", "main weights": "optimizer_offload", "Adam's moments": "optimizer_offload"}


class HostItem(NamedTuple):
    """One use of a node's memory."""

    name: str
    bytes: int


def without_offload(work: Workload) -> Workload:
    """Return a workload whose trainers keep everything on their devices."""
    megatron = replace(work.megatron, offload=False, param_offload=False, grad_offload=False, optimizer_offload=False)
    return replace(work, megatron=megatron, memory=replace(work.memory, offload=False))


def state_items(
    role: str, resting: Footprint, work: Workload, *, saves: bool, copy_bytes: int | None = None
) -> Iterator[HostItem]:
    """Yield what a rank has in host memory: offloaded state, and the copy of a checkpoint, of at most `copy_bytes`.

    `resting` is the footprint of its engine `without_offload`.
    """
    sizes = {item.name.partition(" (")[0]: item.bytes for item in resting.phase(AT_REST).items}
    everything = work.memory.offload or work.megatron.offload
    moved = sum(sizes.get(name, 0) for name, key in OFFLOADED.items() if everything or getattr(work.megatron, key))
    yield HostItem(f"{role} offloaded state", moved)
    copied = sum(sizes.get(name, 0) for name in OFFLOADED) if saves else 0
    yield HostItem(f"{role} checkpoint copies", copied if copy_bytes is None else min(copied, copy_bytes))


def data_items(work: Workload, staleness: int, route_bytes: int) -> Iterator[HostItem]:
    """Yield the controller's data if every response is as long as it may be.

    Trajectories of `staleness` more steps than the present one are in flight; a token has `route_bytes` of routes.
    Ray's object store has the batch of a step.
    """
    batch = work.batch
    tokens = batch.sequences * (batch.max_length or work.tokens) if batch else 0
    yield HostItem("trajectories in flight", tokens * (1 + staleness) * TRAJECTORY)
    yield HostItem("routes", tokens * (1 + staleness) * route_bytes)
    yield HostItem("Ray's object store", tokens * (BATCH + route_bytes))


def route_bytes(model: ModelSpec) -> int:
    """Return the bytes of a token's routes, if servers return them."""
    with_experts = model.layers - len(model.dense_layers) if model.experts else 0
    return with_experts * model.experts_per_token * (1 if model.experts < 255 else 2)


def host_nodes(
    engines: tuple[tuple[EnginePlan, Footprint], ...], work: Workload, staleness: int = 1
) -> dict[int, tuple[HostItem, ...]]:
    """Return the uses of each node's memory on GPUs, with recovery checkpoints; the controller is on the first node.

    Each engine comes with its footprint `without_offload`.
    """
    nodes: dict[int, dict[str, int]] = {}
    for engine, resting in engines:
        own = list(_process_items(engine, resting, work))
        here = [place.node for place in engine.devices]
        ranks = engine.sizes.tp * engine.sizes.pp if BACKENDS[engine.backend].kind == SERVER else 1
        for node in {*here}:
            uses = nodes.setdefault(node, {})
            for item in own:
                uses[item.name] = uses.get(item.name, 0) + item.bytes * -(-here.count(node) // ranks)
    first = [HostItem("controller and Ray", CONTROLLER_BYTES), *data_items(work, staleness, route_bytes(work.model))]
    found = {}
    for node in sorted(nodes):
        items = [*(first if node == min(nodes) else ()), *(HostItem(*use) for use in nodes[node].items())]
        found[node] = tuple(item for item in items if item.bytes)
    return found


def _process_items(engine: EnginePlan, resting: Footprint, work: Workload) -> Iterator[HostItem]:
    if BACKENDS[engine.backend].kind == SERVER:
        yield HostItem(f"{engine.role} servers", SERVER_BYTES)
        return
    yield HostItem(f"{engine.role} ranks", RANK_BYTES)
    saves = engine.role != "ref"
    yield from state_items(engine.role, resting, work, saves=saves)
