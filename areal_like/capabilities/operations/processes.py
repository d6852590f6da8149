"""Resident memory of the processes of a run, by names that stay the same when a process restarts."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from areal_like.runtime.descendants import descendants

_RAY = re.compile(r"gcs_server|raylet|dashboard|DashboardAgent|runtime_env|RuntimeEnvAgent|log_monitor|ray::IDLE")
LOGS = "logs"  # in the run's directory
_OWN_LOG = re.compile(r"([\w-]+)\.log")


class ProcessSize(NamedTuple):
    """The memory of one process: all resident bytes, and the anonymous ones, which it shares with no other."""

    name: str
    pid: int
    resident: int
    private: int


def resident(pid: int) -> Iterator[ProcessSize]:
    """Yield the memory of a process, `controller`, and of each of its descendants.

    A descendant has the name of its log in the run's directory, so `actor-0` is a trainer rank and `server-0` each
    process of a server; otherwise it belongs to Ray (`ray`) or to user code (`other`).
    """
    yield from _measure([pid], "controller")


def resident_of_workers(workers: list[int]) -> list[ProcessSize]:
    """Return the memory of Ray workers on this host and of their descendants, by the names of their logs."""
    return list(_measure(workers))


def _measure(roots: list[int], name_of_roots: str = "") -> Iterator[ProcessSize]:
    for each in sorted({*roots, *(found for root in roots for found in descendants(root))}):
        with suppress(OSError):  # ended meanwhile
            name = (name_of_roots if each in roots else "") or _name(each)
            sizes = dict(re.findall(r"^(VmRSS|RssAnon):\s+(\d+) kB", Path(f"/proc/{each}/status").read_text(), re.M))
            if sizes:  # a zombie has none
                yield ProcessSize(name, each, int(sizes["VmRSS"]) << 10, int(sizes["RssAnon"]) << 10)


def _name(pid: int) -> str:
    """Return the name of a descendant by its command line, or by its output."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    output = Path(os.readlink(f"/proc/{pid}/fd/1"))
    if output.parent.name == LOGS and (found := _OWN_LOG.fullmatch(output.name)):
        return found[1]
    return "ray" if _RAY.search(command) else "other"
