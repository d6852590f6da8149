"""A Ray cluster of somebody else's on loopback: `head.py NODES GPUS CPUS`, with what its nodes only claim to have.

GPUs and CPUs are those of each node. Prints its address and lasts until standard input ends. Lines there are answered
when they are done: `take` has another job take a GPU of every node, `add CPUS` adds a node, `remove` ends the last one.
The environment decides about its token.
"""

from __future__ import annotations

import os
import sys

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group

from areal_like.backends.ray.lifetime import run_lifetime

n_nodes, n_gpus, n_cpus = map(int, sys.argv[1:])
with run_lifetime(f"head{os.getpid()}") as directory:
    resources = {"num_cpus": n_cpus, "num_gpus": n_gpus}
    settings = {"include_dashboard": False, "temp_dir": str(directory / "ray")}
    cluster = Cluster(initialize_head=True, head_node_args=resources | settings)
    nodes = [cluster.add_node(**resources) for _ in range(n_nodes - 1)]
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["take"]:
                ray.init(cluster.address, log_to_driver=False)
                ray.get(placement_group([{"GPU": 1}] * n_nodes, strategy="STRICT_SPREAD").ready())
            case ["add", cpus]:
                nodes.append(cluster.add_node(**resources | {"num_cpus": int(cpus)}))
            case ["remove"]:
                cluster.remove_node(nodes.pop(), allow_graceful=False)
        print("done", flush=True)
    ray.shutdown()
    cluster.shutdown()
