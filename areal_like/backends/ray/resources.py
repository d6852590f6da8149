"""Whether an existing Ray cluster has the resources of a plan, which is asked before a run starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from areal_like.backends.ray.address import address_problem
from areal_like.backends.ray.bundles import bundles, fits, names_gpus, shortage
from areal_like.backends.ray.lifetime import PACKAGE_ROOT
from areal_like.core.config.schema import SchedulerConfig

if TYPE_CHECKING:
    from allocation.plan import Plan

ASK_LIMIT_S = 120.0  # for Ray's import, its connection and the answer


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
            [sys.executable, "-P", "-m", "areal_like.backends.ray.listing", address],
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
