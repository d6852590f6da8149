"""A Ray cluster of somebody else's on loopback, with two GPUs that it only claims to have.

Prints its address and lasts until standard input ends. The environment decides about its token.
"""

from __future__ import annotations

import os
import sys

import ray

from areal_like.cluster.lifetime import run_lifetime

with run_lifetime(f"head{os.getpid()}") as directory:
    context = ray.init(
        "local", num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=str(directory / "ray")
    )
    print(context.address_info["gcs_address"], flush=True)
    sys.stdin.read()
    ray.shutdown()
