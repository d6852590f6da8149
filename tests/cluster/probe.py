"""Starts plans with a probe in place of every engine: `probe.py ADDRESS LOG_DIR`, plans as JSON on standard input.

An address of `local` means a private cluster. Of each line of input, a plan, it prints what every member saw, or why it
did not start.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from allocation import Device, Plan
from areal_like.backends.ray.run import RunCluster, run_cluster
from areal_like.backends.ray.shared_files import FileSharing, Need
from areal_like.core.config.schema import SchedulerConfig
from areal_like.core.errors import ClusterError

SHOWN = (
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "TORCHINDUCTOR_CACHE_DIR",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "TMPDIR",
)


class Probe:
    """Sees what an engine would see."""

    def look(self) -> dict[str, Any]:
        import ray

        variables = {name: os.environ.get(name) for name in SHOWN}
        return {"node": ray.get_runtime_context().get_node_id(), "nice": os.nice(0), **variables}


async def look(cluster: RunCluster, role: str, devices: list[tuple[Device, ...]]) -> list[dict[str, Any]]:
    group = await cluster.start_group(role, Probe, devices, lambda rank, host: {}, call_timeout_s=600)
    return await group.call_all("look", phase="start-up")


async def start(
    plan: Plan, address: str, log_dir: Path, uses_gpus: bool, timeout_s: float, files: dict[str, Path] | None
) -> dict[str, Any]:
    """What each member of each role saw: a process for every server and for every trainer rank."""
    kind = "local" if address == "local" else "ray"
    scheduler = SchedulerConfig(type=kind, address=address, startup_timeout_s=timeout_s)  # type: ignore[arg-type]
    members = {
        engine.role: [server.devices for server in engine.servers] or [(device,) for device in engine.devices]
        for engine in plan.engines
    }
    warnings: list[str] = []
    try:
        async with run_cluster(
            scheduler,
            plan,
            uses_gpus=uses_gpus,
            log_dir=log_dir,
            shared_dir=log_dir / "shared",
            files=files,
            warn=warnings.append,
            sharing=FileSharing(Need("weight_update.mode=disk", "set weight_update.mode=collective")),
        ) as cluster:
            seen = await asyncio.gather(*(look(cluster, role, devices) for role, devices in members.items()))
            return dict(zip(members, seen, strict=True)) | ({"warnings": warnings} if files else {})
    except ClusterError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    address, log_dir = sys.argv[1:]
    for line in sys.stdin:
        asked = json.loads(line)
        plan = Plan.from_json(asked["plan"])
        files = {key: Path(path) for key, path in asked.get("files", {}).items()}
        seen = asyncio.run(start(plan, address, Path(log_dir), asked["uses_gpus"], asked["timeout_s"], files))
        print(json.dumps(seen), flush=True)
