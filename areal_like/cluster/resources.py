"""The resources that a plan needs and a Ray cluster has; `check_existing` asks a cluster before a run starts.

`python -m areal_like.cluster.resources ADDRESS` prints a cluster's resources as JSON: Ray can be imported only once per
process, and the controller imports it later.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_like.cluster.lifetime import PACKAGE_ROOT
from areal_like.cluster.ray_cluster import address_problem, ray_cluster
from areal_like.config.schema import SchedulerConfig
from areal_like.errors import ClusterError

if TYPE_CHECKING:
    from allocation.plan import Device, Plan

CONNECT_S = 20.0  # for a connection to Ray, whose own limit is a minute and more
ASK_LIMIT_S = 120.0  # for Ray's import, its connection and the answer

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


def check_existing(
    scheduler: SchedulerConfig, plan: Plan | None, *, uses_gpus: bool, guessed: bool = False
) -> Iterator[tuple[str, str, str]]:
    """Yield key, message and help of problems of an existing cluster with the plan; starts nothing there.

    Whether the run uses GPUs may be `guessed` from this host, which may be the one node without any. The nodes' totals
    decide: the run waits for resources that others hold now.
    """
    if problem := address_problem(scheduler.address):
        yield "scheduler.address", *problem
        return
    there = _ask(scheduler.address)
    if "problem" in there:
        help = "give the address of a cluster that this host is a node of, or set scheduler.type=local"
        yield "scheduler.address", there["problem"], help
    elif guessed and not uses_gpus and any(node.get("GPU") for node in there["nodes"]):
        message = "auto means cpu here, as this host has no GPU, and other nodes of the cluster have some"
        yield "device", message, "write device=cuda, or device=cpu"
    elif plan and not fits(asked := bundles(plan, uses_gpus=uses_gpus), there["nodes"], spread=names_gpus(plan)):
        help = "add nodes with `ray start --address=...`, or write a layout and cluster.n_nodes for those there are"
        message = f"the Ray cluster is too small: {shortage(asked, there)}"
        yield "cluster.n_nodes", message, help


def _ask(address: str) -> dict[str, Any]:
    try:
        answer = subprocess.run(
            [sys.executable, "-P", "-m", __name__, address],
            env={**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ASK_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"the Ray cluster at {address} did not list its nodes within {ASK_LIMIT_S:g} s"}
    if answer.returncode:
        last = (answer.stderr.decode(errors="replace").strip() or f"exit code {answer.returncode}").splitlines()[-1]
        return {"problem": f"the Ray cluster at {address} could not list its nodes: {last}"}
    return json.loads(answer.stdout.splitlines()[-1])


def main() -> None:
    """Print the cluster's resources, or the reason why they are unknown."""
    scheduler = SchedulerConfig(type="ray", address=sys.argv[1], startup_timeout_s=CONNECT_S)
    try:
        with ray_cluster(scheduler, n_slots=0, uses_gpus=False, directory=Path()):
            print(json.dumps(cluster_resources()))
    except ClusterError as error:
        late = f"the Ray cluster at {scheduler.address} did not accept a connection within {CONNECT_S:g} s"
        print(json.dumps({"problem": late if isinstance(error.__cause__, TimeoutError) else str(error)}))
    sys.stdout.flush()
    os._exit(0)  # a connection that hangs would delay the exit


if __name__ == "__main__":
    main()
