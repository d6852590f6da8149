"""Descendants of this process, found through the kernel's tree of parents and children.

Sessions, process groups and environments do not matter. A process leaves the tree only as an orphan, and an orphan
becomes a child of the nearest ancestor that adopts orphans.
"""

import ctypes
import os
import signal
import time
from collections.abc import Iterable, Set
from contextlib import suppress
from pathlib import Path

# They remove the shared memory of a dead process, then end by themselves.
_CLEANERS = (b"resource_tracker", b"torch_shm_manager")
_CLEAN_S = 2.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)


def adopt_orphans(adopt: bool = True) -> None:
    """Make this process the parent of all orphaned descendants; exec keeps the setting, children do not inherit it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread of process `parent` that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(1)


def children(pid: int | str = "self") -> set[int]:
    """Return the process ids of a process's children, zombies included."""
    return {child for file in Path(f"/proc/{pid}/task").glob("*/children") for child in _numbers(file)}


def descendants(pid: int) -> set[int]:
    """Return the process ids of a process's children, their children and so on."""
    found, new = set[int](), children(pid)
    while new:
        found |= new
        new = {grandchild for child in new for grandchild in children(child)} - found
    return found


def end_children(kept: Set[int] = frozenset()) -> None:
    """Kill this process's children except `kept`, and children adopted meanwhile; return when they are gone."""
    while ended := children() - kept:
        for pid in ended:  # these ids cannot have been reused: only this process waits for them
            with suppress(ChildProcessError, ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def kill_orphans(kept: Set[int], cleaners: dict[int, float]) -> bool:
    """Kill this process's children except `kept`; return whether there are any.

    `cleaners` has the children that clean up after a dead process, with the time when they were first seen.
    """
    orphans, present = children() - kept, time.monotonic()
    for pid in cleaners.keys() - orphans:
        del cleaners[pid]
    for pid in orphans:
        if is_cleaner(pid) and present - cleaners.setdefault(pid, present) < _CLEAN_S:
            continue
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)
    return bool(orphans)


def is_cleaner(pid: int) -> bool:
    """Return whether a process removes the shared memory of others when they are dead."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # ended meanwhile
        return False
    return any(name in command for name in _CLEANERS)


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the memory of processes, 0 for an ended process; a page shared by two of them counts twice."""
    total = 0
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


def _numbers(file: Path) -> list[int]:
    """Return the process ids in a thread's list of children, [] if the thread has ended."""
    try:
        return [int(pid) for pid in file.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
