"""The descendants of a process, however they were started, recorded while their parents live.

A process that leaves its session, group, environment and parent is still the child of a recorded process when it is
first seen, and stays recorded as an orphan.
"""

import math
import os
import time
from collections.abc import Iterable, Set
from contextlib import suppress
from pathlib import Path

import psutil

type Identity = tuple[int, int]  # process id, and start in clock ticks since boot; together they are unique

_STATE, _PARENT, _STARTED = 0, 1, 19  # positions in /proc/PID/stat after the name in brackets, proc_pid_stat(5)
_DEAD = (b"Z", b"X")


class Lineage:
    """The descendants of the process `root`, except its older children `others` and their descendants.

    With `until`, in clock ticks since boot, later children of `root` are excluded, too. Call `look` several times a
    second: only a process that starts and loses its parent between two calls escapes. Descendants of a worker, a
    process that the others must not outlive, are recorded as its own.
    """

    def __init__(self, root: int, others: Set[int] = frozenset()) -> None:
        table = _table()
        self._root = root, table[root][1] if root in table else 0
        self._others = {(pid, table[pid][1]) for pid in others if pid in table}
        self._noted: set[Identity] = set()
        self._workers: dict[Identity, Identity] = {}  # by descendant
        self.until = math.inf

    def look(self, more: Iterable[Identity] = (), workers: Set[Identity] = frozenset()) -> None:
        """Record the current descendants, and the processes `more` and `workers` with their descendants."""
        table = _table()
        alive = {(pid, started) for pid, (_, started) in table.items()}
        children: dict[int, list[Identity]] = {}
        for pid, (parent, started) in table.items():
            children.setdefault(parent, []).append((pid, started))
        first = children.get(self._root[0], []) if self._root in alive else []
        self._noted |= {child for child in first if child[1] < self.until} - self._others
        self._noted = (self._noted | set(more) | workers) & alive
        left = [*self._noted]
        while left:
            process = left.pop()
            own = [child for child in children.get(process[0], ()) if child not in self._others]
            worker = process if process in workers else self._workers.get(process)
            if worker is not None:
                self._workers |= dict.fromkeys(set(own) - self._workers.keys(), worker)
            left += (new := set(own) - self._noted)
            self._noted |= new
        self._workers = {child: worker for child, worker in self._workers.items() if child in self._noted}

    def living(self) -> list[psutil.Process]:
        """Return the recorded processes that are alive."""
        return _living(self._noted)

    def find_abandoned(self) -> list[psutil.Process]:
        """Return the living descendants of workers that have ended."""
        ended = {worker for worker in self._workers.values() if not lives(worker)}
        return _living(child for child, worker in self._workers.items() if worker in ended)


def _living(processes: Iterable[Identity]) -> list[psutil.Process]:
    found = []
    for each in processes:
        with suppress(psutil.Error):
            process = psutil.Process(each[0])
            if lives(each):
                found.append(process)
    return found


def identity(pid: int) -> Identity:
    """Return the identity of a process, zombies included; its start is 0 if it does not exist."""
    fields = _fields(pid)
    return pid, int(fields[_STARTED]) if fields else 0


def lives(process: Identity) -> bool:
    """Return whether the process exists and is not a zombie."""
    fields = _fields(process[0])
    return bool(fields) and int(fields[_STARTED]) == process[1] and fields[_STATE] not in _DEAD


def ticks_now() -> int:
    """Return the time in the unit of processes' start times."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def _table() -> dict[int, tuple[int, int]]:
    """Return parent and start of every process that is not a zombie, by process id."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _fields(int(name))) and fields[_STATE] not in _DEAD:
            found[int(name)] = int(fields[_PARENT]), int(fields[_STARTED])
    return found


def _fields(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:  # ended meanwhile
        return []
