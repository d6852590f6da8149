"""A Ray cluster of somebody else's on loopback: prints its address and token, lasts until standard input ends."""

from __future__ import annotations

import os
import sys

from areal_like.cluster.lifetime import run_lifetime
from areal_like.cluster.ray_cluster import ray_cluster
from areal_like.config.schema import SchedulerConfig

with (
    run_lifetime(f"head{os.getpid()}") as directory,
    ray_cluster(SchedulerConfig(), n_slots=4, uses_gpus=False, directory=directory),
):
    import ray

    print(ray.get_runtime_context().gcs_address, os.environ["RAY_AUTH_TOKEN"], flush=True)
    sys.stdin.read()
