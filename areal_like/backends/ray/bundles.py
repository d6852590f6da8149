"""The resources that a plan needs and a Ray cluster has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from allocation.plan import Device, Plan

type Amounts = Mapping[str, float]


def names_gpus(plan: Plan) -> bool:
    """Return whether the allocation names a node's GPUs with `@`."""
    return "@" in plan.allocation


def node_devices(plan: Plan) -> list[list[Device]]:
    """Return the devices of each node of the plan, both in order."""
    nodes = sorted({device.node for device in plan.devices})
    return [sorted(device for device in plan.devices if device.node == node) for node in nodes]


def bundles(plan: Plan, *, uses_gpus: bool) -> list[dict[str, float]]:
    """Return the resources to reserve on each node: a CPU and a GPU for every device.

    Ray grants GPUs from a node's first one on, so `@` needs all GPUs up to the last named one.
    """
    exact = names_gpus(plan)
    return [
        {"CPU": float(len(part))} | ({"GPU": float(part[-1].gpu + 1 if exact else len(part))} if uses_gpus else {})
        for part in node_devices(plan)
    ]


def fits(asked: Iterable[Amounts], nodes: Iterable[Amounts], *, spread: bool) -> bool:
    """Return whether the bundles, the largest first, fit on the nodes; with `spread` a node holds at most one."""
    left = [dict(node) for node in nodes]
    for bundle in sorted(asked, key=lambda bundle: sorted(bundle.items()), reverse=True):
        for node in left:
            if all(node.get(name, 0) >= amount for name, amount in bundle.items()):
                node.update({name: 0 if spread else node[name] - amount for name, amount in bundle.items()})
                break
        else:
            return False
    return True


def cluster_resources() -> dict[str, Any]:
    """Return the total and free resources of every living node of the connected cluster."""
    import ray

    return {"nodes": [node["Resources"] for node in ray.nodes() if node["Alive"]], "free": ray.available_resources()}


def shortage(asked: Sequence[Amounts], there: Mapping[str, Any], who: str = "the plan") -> str:
    """Describe requested and available resources for a message."""

    def show(resources: Amounts) -> str:
        return ", ".join(f"{resources.get(name, 0):g} {name}" for name in asked[0])

    def show_all(nodes: Iterable[Amounts]) -> str:
        counts = Counter(map(show, nodes))
        return "; ".join(f"{count} node{'s'[: count > 1]} with {what}" for what, count in counts.items())

    return (
        f"{who} asks for {show_all(asked)}\n  the cluster has {show_all(there['nodes'])}\n"
        f"  free now: {show(there['free'])}"
    )
