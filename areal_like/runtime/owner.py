"""Ownership of a run's directory: one process at a time, on this host or on another one that shares the file system.

On one host, a lock (flock) shows that no process of the last run is left. On some file systems locks are local to the
host (Lustre with `localflock`, NFS with `local_lock`), so each owner also has a file `owner-N.json` with a counter that
it increments every few seconds. N is the fencing number: it grows with each owner, and an owner that finds a larger
number than its own stops writing.
"""

import errno
import fcntl
import json
import os
import re
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from areal_like.core.checkpoint.files import names_in, reading
from areal_like.core.errors import DirectoryTaken

BEAT_S = 10.0
HUNG_S = 5.0  # a longer write is not waited for at the end
SILENT_S = 60.0  # an owner on another host whose counter stands still this long is gone
MENDED_BEATS = 1.5  # an owner rewrites its file with every beat, so a file that stays unreadable has no owner
_NAME = re.compile(r"owner-([0-9]+)\.json")
_SIZE = 1024  # of the file, which is written in place, so that a full disk does not stop the beats
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@dataclass(frozen=True)
class Owner:
    """Content of the owner file: `boot` names the host until it restarts, `beats` is the counter."""

    host: str
    boot: str
    pid: int
    started: float
    beats: int = 0
    ended: bool = False

    @property
    def is_here(self) -> bool:
        """Whether the owner is, or was, a process of this host."""
        return self.boot == boot_id()

    @property
    def lives(self) -> bool:
        """Whether the owner is another process of this host and is alive."""
        try:
            return self.pid != os.getpid() and psutil.Process(self.pid).create_time() == self.started
        except psutil.Error:
            return False


class Ownership:
    """This process's ownership: the descriptor `lock`, and the file with number `fence`, which a thread renews."""

    def __init__(self, directory: Path, lock: int, fence: int, file: int) -> None:
        self.lock = lock
        self._directory, self._fence, self._file = directory, fence, file
        self._ends, self._writing, self._owner = threading.Event(), threading.Lock(), this_process()
        self._write()
        threading.Thread(target=self._keep_counting, name="owner", daemon=True).start()

    def check(self) -> None:
        """Raise DirectoryTaken if another process has taken the directory since."""
        if (last := last_owner(self._directory)) and last[0] > self._fence:
            raise DirectoryTaken(
                f"{self._directory.parent} was taken over by {describe_owner(last[1])}, because this process was silent for more "
                f"than {SILENT_S:g} s. This process stops writing; the other one continues the run"
            )

    def release(self) -> None:
        """Release the directory."""
        self._ends.set()
        try:
            if self._writing.acquire(timeout=HUNG_S):  # otherwise the thread hangs in a write and keeps the descriptor
                self._owner = replace(self._owner, ended=True)
                with suppress(OSError), os.fdopen(self._file, "wb", 0):  # then the lock, or silence, shows it
                    self._write()
        finally:
            with suppress(OSError):  # which has been released, too
                os.close(self.lock)

    def _keep_counting(self) -> None:
        while not self._ends.wait(BEAT_S):
            with self._writing:
                if self._ends.is_set():
                    return
                self._owner = replace(self._owner, beats=self._owner.beats + 1)
                with suppress(OSError):
                    self._write()

    def _write(self) -> None:
        os.pwrite(self._file, json.dumps(asdict(self._owner)).ljust(_SIZE).encode(), 0)
        os.fsync(self._file)


@dataclass(eq=False)
class Silence:
    """Watches an owner of another host for as long as it may still be there."""

    _seen: tuple[int, Owner | None] | None = None
    _since: float = 0.0

    def has_ended(self, last: tuple[int, Owner | None] | None) -> bool:
        """Return whether the last owner is known to be gone; the caller holds the host's lock."""
        if last is None or (last[1] and last[1].ended):
            return True
        if last[1] and last[1].is_here:
            return not last[1].lives
        if last != self._seen:
            self._seen, self._since = last, time.monotonic()
        limit_s = SILENT_S if last[1] else min(SILENT_S, MENDED_BEATS * BEAT_S)
        return time.monotonic() - self._since >= limit_s


def try_lock(lock: int) -> bool:
    """Take the lock; return whether no other process of this host has it. Succeeds on file systems without locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def take_over(directory: Path, lock: int, silence: Silence) -> Ownership | None:
    """Become the owner with the descriptor `lock`; None while another owner is, or may be, alive."""
    if not try_lock(lock):
        return None
    last = last_owner(directory)
    return claim(directory, lock, last[0] + 1 if last else 1) if silence.has_ended(last) else None


def claim(directory: Path, lock: int, fence: int) -> Ownership | None:
    """Become the owner with this fencing number; None if another process was faster."""
    path = _path(directory, fence)
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return None
    last = last_owner(directory)
    if last and last[0] > fence:
        os.close(file)
        path.unlink(missing_ok=True)
        return None
    for number in _numbers(directory):
        if number < fence:
            _path(directory, number).unlink(missing_ok=True)
    try:
        return Ownership(directory, lock, fence, file)
    except BaseException:
        os.close(file)
        path.unlink(missing_ok=True)
        raise


def last_owner(directory: Path) -> tuple[int, Owner | None] | None:
    """Return the last owner's number and its file's content, None if that is not written yet."""
    if not (numbers := _numbers(directory)):
        return None
    path = _path(directory, max(numbers))
    try:
        with reading(path):
            return max(numbers), Owner(**json.loads(path.read_text()))
    except (ValueError, TypeError):
        return max(numbers), None


def is_taken(directory: Path) -> bool:
    """Return whether a process may own the directory now, without waiting or taking it."""
    last = last_owner(directory)
    if last and last[1] and not (last[1].ended or last[1].is_here):
        return True
    with suppress(OSError):
        lock = os.open(directory / "lock", os.O_RDWR)
        try:
            return not try_lock(lock)
        finally:
            os.close(lock)
    return False


def holders(path: Path) -> list[psutil.Process]:
    """Return the processes of this host, other than this one, that have a file open."""
    found = []
    with suppress(OSError):
        wanted = path.stat()
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                folder = Path(f"/proc/{process.pid}/fd")
                if process.pid != os.getpid() and any(_is_same(file, wanted) for file in folder.iterdir()):
                    found.append(process)
    return found


def describe_owner(owner: Owner | None) -> str:
    """Return the description of an owner for a message."""
    return f"process {owner.pid} on host {owner.host}" if owner else "another process"


def this_process() -> Owner:
    """Return the initial content of this process's owner file."""
    return Owner(socket.gethostname(), boot_id(), os.getpid(), psutil.Process().create_time())


def boot_id() -> str:
    """Return a unique name of this host, which changes with every restart."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _is_same(file: Path, wanted: os.stat_result) -> bool:
    with suppress(OSError):
        return os.path.samestat(file.stat(), wanted)
    return False


def _numbers(directory: Path) -> list[int]:
    return [int(found[1]) for name in names_in(directory) if (found := _NAME.fullmatch(name))]


def _path(directory: Path, fence: int) -> Path:
    return directory / f"owner-{fence}.json"
