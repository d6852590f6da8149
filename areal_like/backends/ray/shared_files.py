"""Checks that each node that needs the controller's files below `cluster.fileroot` can read them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, NamedTuple

from areal_like.backends.ray.placement import Placement, on_bundle, ray_errors
from areal_like.core.errors import ClusterError, writing

if TYPE_CHECKING:
    from allocation.plan import Device

SHOWN_S = 10.0  # for a network file system to show a new file on other hosts
ANSWER_S = 120.0  # for a node's answer after that, which starts a process


class Need(NamedTuple):
    """A setting that requires shared files, and the alternative that does not."""

    setting: str
    instead: str


@dataclass(frozen=True)
class FileSharing:
    """The nodes that must share `cluster.fileroot` with the controller: all because of `everywhere`, or by device.

    `models` lists directories that the run created or downloaded; nodes without them receive copies.
    """

    everywhere: Need | None = None
    devices: Mapping[Device, Need] = field(default_factory=dict)
    models: Collection[Path] = ()

    def need(self, devices: Collection[Device]) -> Need | None:
        """Return why the node of these devices must share the run's files, None if it need not."""
        return self.everywhere or next((self.devices[each] for each in devices if each in self.devices), None)


NOTHING_SHARED = FileSharing()


async def check_shared(placement: Placement, directory: Path, sharing: FileSharing) -> list[str]:
    """Return the hosts that cannot read files that this process writes to a directory.

    Raises ClusterError about a host that must.
    """
    hosts = {slot.bundle: slot.host for slot in placement.slots.values()}
    found = dict(zip(hosts, await _look(placement, hosts, directory), strict=True))
    for bundle, problem in found.items():
        devices = [device for device, slot in placement.slots.items() if slot.bundle == bundle]
        if problem and (need := sharing.need(devices)):
            raise ClusterError(
                f"node {hosts[bundle]} does not see a file that this host has written to {directory}: {problem}. "
                f"{need.setting} needs files that the node shares with this host. Set cluster.fileroot to a directory on a "
                f"file system that all of them share under the same path, or {need.instead}"
            )
    return [hosts[bundle] for bundle, problem in found.items() if problem]


async def _look(placement: Placement, hosts: Mapping[int, str], directory: Path) -> list[str]:
    """Write a file, and return for each bundle's node why it cannot read the file, "" if it can."""
    import ray

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

    probe = directory / f".probe-{token_hex(6)}"
    with ray_errors(), writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        probe.touch()
        try:
            remote = ray.remote(look)
            looking = [
                on_bundle(remote, placement.group, bundle, max_retries=0).remote(str(probe), SHOWN_S)
                for bundle in hosts
            ]
            async with asyncio.timeout(SHOWN_S + ANSWER_S):
                return list(await asyncio.gather(*looking))
        except TimeoutError as error:
            raise ClusterError(
                f"not every node of {', '.join(hosts.values())} answered within {SHOWN_S + ANSWER_S:g} s whether it sees "
                f"{directory} (cluster.fileroot)"
            ) from error
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)
