"""Search for the shared memory that a run created: it outlives a killed process, and does not name the run."""

import ctypes
import os
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from areal_like.backends.ray.lineage import Identity, identity, lives

SHARED_MEMORY, SYSTEM_V = Path("/dev/shm"), Path("/proc/sysvipc/shm")
FOREIGN_S = 2.0  # a segment that no member uses by then is not the run's
_REST = 20  # multiples of a look's time, at least, to the next look at a creation
_FILE = re.compile(rf"{SHARED_MEMORY}/([^/\n]+)$", re.MULTILINE)
_CREATED, _NONBLOCK, _REMOVE = 0x100, 0o4000, 0  # IN_CREATE and IN_NONBLOCK of inotify(7), IPC_RMID of shmctl(2)
_SYSTEM_V = "/"  # before a number, unlike in a file's name


class SharedMemoryWatch:
    """A record of new segments that members of the run use; call `look` several times a second.

    A segment is a file in /dev/shm, such as POSIX shared memory or a semaphore, or a segment of System V. One that was
    created below a child of `root`, such as by a workflow's worker, is removed when that worker has ended and no other
    member uses it; `remove` removes the rest.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._created = _watch_creations()
        self._others = _names()
        self._seen: dict[str, float] = {}  # when unknown segments were seen first
        self._made: dict[str, Identity | None] = {}  # the worker that a segment ends with
        self._rests_until = 0.0

    @property
    def creations(self) -> list[int]:
        """A descriptor that is readable when `look` should be called at once; none for a while after a long look."""
        return [self._created] if self._created >= 0 and time.monotonic() >= self._rests_until else []

    def look(self, members: Callable[[], Iterable[psutil.Process]]) -> None:
        """Attribute the segments that have appeared since the last look; `members` is asked only if there are any."""
        start = time.monotonic()
        if self.creations:
            with suppress(BlockingIOError):
                os.read(self._created, 1 << 16)
        names = _names()
        self._others &= names
        self._made = {name: worker for name, worker in self._made.items() if name in names}
        if unknown := names - self._others - self._made.keys():
            self._attribute(unknown, members())
        ended = {name for name, worker in self._made.items() if worker and not lives(worker)}
        if ended:
            _remove(ended - set().union(_find_used(self._root), *(_find_used(process.pid) for process in members())))
        self._rests_until = time.monotonic() + _REST * (time.monotonic() - start)

    def _attribute(self, unknown: set[str], members: Iterable[psutil.Process]) -> None:
        for process in members:
            for name in unknown & _find_used(process.pid):
                self._made.setdefault(name, self._worker(process))
        present = time.monotonic()
        self._seen = {name: self._seen.get(name, present) for name in unknown - self._made.keys()}
        self._others |= {name for name, since in self._seen.items() if present - since >= FOREIGN_S}

    def _worker(self, process: psutil.Process) -> Identity | None:
        with suppress(psutil.Error):
            chain = [process.pid, *(parent.pid for parent in process.parents())]
            if self._root in chain[2:]:
                return identity(chain[chain.index(self._root) - 2])
        return None

    def remove(self) -> None:
        """Remove segments that the run created and did not remove itself."""
        _remove(self._made)


def _watch_creations() -> int:
    """Return a descriptor that is readable when a file was created in /dev/shm, -1 where the system refuses it."""
    libc = ctypes.CDLL(None)
    descriptor: int = libc.inotify_init1(_NONBLOCK)
    if descriptor >= 0 and libc.inotify_add_watch(descriptor, os.fsencode(SHARED_MEMORY), _CREATED) < 0:
        os.close(descriptor)
        return -1
    return descriptor


def _names() -> set[str]:
    files = set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()
    return files | {name for name, _ in _system_v()}


def _system_v() -> list[tuple[str, int]]:
    """Return name and creator of each segment of System V."""
    with suppress(OSError):  # a system without them
        rows = [line.split() for line in SYSTEM_V.read_text().splitlines()[1:]]
        return [(_SYSTEM_V + row[1], int(row[4])) for row in rows]
    return []


def _find_used(pid: int) -> set[str]:
    """Return the segments that a process has mapped or open, or has created as segments of System V."""
    folder = Path(f"/proc/{pid}")
    found = {name for name, creator in _system_v() if creator == pid}
    with suppress(OSError):  # ended meanwhile
        found |= set(_FILE.findall((folder / "maps").read_text()))
        for descriptor in os.listdir(folder / "fd"):
            with suppress(OSError):
                found |= set(_FILE.findall(os.readlink(folder / "fd" / descriptor)))
    return found


def _remove(names: Iterable[str]) -> None:
    for name in names:
        if name.startswith(_SYSTEM_V):
            ctypes.CDLL(None).shmctl(int(name.removeprefix(_SYSTEM_V)), _REMOVE, None)
        else:
            with suppress(OSError):
                (SHARED_MEMORY / name).unlink()
