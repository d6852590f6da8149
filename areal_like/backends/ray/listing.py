"""`python -m areal_like.backends.ray.listing ADDRESS` prints a cluster's resources as JSON.

Ray can be imported only once per process, and the controller imports it later.
"""

import json
import os
import sys
from pathlib import Path

from areal_like.backends.ray.bundles import cluster_resources
from areal_like.backends.ray.ray_cluster import ray_cluster
from areal_like.core.config.schema import SchedulerConfig
from areal_like.core.errors import ClusterError

CONNECT_S = 20.0  # for a connection to Ray, whose own limit is a minute and more


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
