"""Whether every node of a run sees the files that the controller writes below `cluster.fileroot`."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from areal_like.cluster.placement import Placement, ray_errors
from areal_like.errors import ClusterError, writing

SHOWN_S = 10.0  # that a network file system has for showing a new file to other hosts
ANSWER_S = 120.0  # that a node has for its answer after that: it starts a process for it


async def check_shared(placement: Placement, directory: Path) -> None:
    """Raise ClusterError where a node of the placement does not see what this process writes into a directory."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def look(path: str, limit_s: float) -> str:  # sent by value
        deadline = time.monotonic() + limit_s
        while True:
            try:
                with open(path, "rb"):
                    return ""
            except OSError as error:
                if time.monotonic() > deadline:
                    return error.strerror or str(error)
            time.sleep(0.2)

    hosts = {slot.bundle: slot.host for slot in placement.slots.values()}
    probe = directory / f".probe-{token_hex(6)}"
    with ray_errors(), writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        probe.touch()
        try:
            looking = [
                ray.remote(look)
                .options(
                    num_cpus=0,
                    max_retries=0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        placement.group, placement_group_bundle_index=bundle
                    ),
                )
                .remote(str(probe), SHOWN_S)
                for bundle in hosts
            ]
            async with asyncio.timeout(SHOWN_S + ANSWER_S):
                found = await asyncio.gather(*looking)
        except TimeoutError as error:
            raise ClusterError(
                f"not every node of {', '.join(hosts.values())} answered within {SHOWN_S + ANSWER_S:g} s whether it sees "
                f"{directory} (cluster.fileroot)"
            ) from error
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)
    for host, problem in zip(hosts.values(), found, strict=True):
        if problem:
            raise ClusterError(
                f"node {host} does not see a file that this host has written to {directory}: {problem}. All nodes of a "
                "run read and write there. Set cluster.fileroot to a directory on a file system that all of them share "
                "under the same path"
            )
