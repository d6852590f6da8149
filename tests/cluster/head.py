"""A Ray cluster of somebody else's on loopback: `head.py NODES GPUS`, with GPUs that its nodes only claim to have.

Prints its address and lasts until standard input ends. A line there takes a GPU of every node away, and is answered
when it has. The environment decides about its token.
"""

from __future__ import annotations

import os
import sys

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group

from areal_like.cluster.lifetime import run_lifetime

n_nodes, n_gpus = map(int, sys.argv[1:])
with run_lifetime(f"head{os.getpid()}") as directory:
    resources = {"num_cpus": max(4, n_gpus), "num_gpus": n_gpus}
    settings = {"include_dashboard": False, "temp_dir": str(directory / "ray")}
    cluster = Cluster(initialize_head=True, head_node_args=resources | settings)
    for _ in range(n_nodes - 1):
        cluster.add_node(**resources)
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    for _ in sys.stdin:
        ray.init(cluster.address, log_to_driver=False)
        ray.get(placement_group([{"GPU": 1}] * n_nodes, strategy="STRICT_SPREAD").ready())
        print("taken", flush=True)
    ray.shutdown()
    cluster.shutdown()
