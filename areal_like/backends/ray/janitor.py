"""The last process of a run: waits for the end of its parent, then removes the run's leftovers.

Run as a module, `python -m areal_like.backends.ray.janitor RUN_ID CHILDREN DIRECTORY...`, with two pipes. The time of
the run's end on standard input (`ticks_now`), or the end of this pipe or of the process that started the janitor,
SIGKILL included, says that the run has ended. Standard output is closed when all is done. Members of the run are

- descendants of the process that started the janitor, except its earlier CHILDREN (`12,34`) and their descendants;
- processes that started with `AREAL_LIKE_RUN=RUN_ID` in their environment, and Ray workers that have joined the run
  (`member_file`), with their descendants.

When a Ray worker ends while the run goes on, by SIGKILL for example, its descendants are killed.
"""

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from areal_like.backends.ray.containers import remove_containers
from areal_like.backends.ray.lineage import Identity, Lineage, identity
from areal_like.backends.ray.shared_memory import SharedMemoryWatch
from areal_like.runtime.descendants import is_cleaner

RUN_VARIABLE = "AREAL_LIKE_RUN"
LOOK_S = 0.2  # between two scans of this host's processes
_REST = 20  # multiples of a scan's CPU time, at least
_MEMBER, _WORKER = "member.", "worker."
GRACE_S = 2.0  # between SIGTERM and SIGKILL
LIMIT_S = 60.0  # a process that survives SIGKILL this long waits for the system


def main() -> None:
    """Wait for the owner's end, then clean up."""
    run_id, others, *directories = sys.argv[1:]
    owner = psutil.Process(os.getppid())
    lineage = Lineage(owner.pid, {int(pid) for pid in others.split(",") if pid} | {os.getpid()})
    if os.fork():  # Ray kills the children of an ending worker
        os._exit(0)
    print(os.getpid(), flush=True)  # an owner that adopts orphans waits for this process
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    run = _Run(run_id, owner, lineage, Path(directories[0]))
    shared_memory, owners = SharedMemoryWatch(owner.pid), SharedMemoryWatch(owner.pid)

    def look() -> None:
        run.look()
        shared_memory.look(run.living)
        owners.look(lambda: filter(_lives, [owner]))  # its pid may have been reused

    # A child that the owner forked without exec also holds the pipe, so the pipe's end alone is not enough.
    while sys.stdin not in select.select([sys.stdin, *shared_memory.creations], [], [], LOOK_S)[0] and _lives(owner):
        look()
    if _lives(owner) and (ended := os.read(0, 64)):  # its later children do not belong to the run
        lineage.until = int(ended)
    look()
    run.end()
    remove_containers(Path(directories[0]), run_id)
    shared_memory.remove()
    if not _lives(owner):  # a living process may keep its own; a process killed with its tracker leaves them
        owners.remove()
    for directory in directories:  # last, because a member might still write
        shutil.rmtree(directory, ignore_errors=True)


@dataclass
class _Run:
    """The members of a run."""

    run_id: str
    owner: psutil.Process
    lineage: Lineage
    directory: Path
    next_look: float = 0.0

    def look(self) -> None:
        """Record descendants; slow scans, of thousands of processes, run less often."""
        if time.monotonic() >= self.next_look:
            start = time.process_time()  # time when a busy machine does not run this process does not count
            self._look()
            _signal((each for each in self.lineage.find_abandoned() if not is_cleaner(each.pid)), signal.SIGKILL)
            self.next_look = time.monotonic() + _REST * (time.process_time() - start)

    def _look(self, *more: Identity) -> None:
        workers = set(find_workers(self.directory))
        self.lineage.look([*_find_joined(self.directory, _MEMBER), *more], workers)

    def living(self) -> list[psutil.Process]:
        """Scan immediately; return all living members."""
        self._look(*(identity(process.pid) for process in members(self.run_id)))
        return [process for process in self.lineage.living() if process.pid not in (os.getpid(), self.owner.pid)]

    def end(self) -> None:
        """Terminate, then kill, until no member is left or LIMIT_S seconds have passed."""
        start = time.monotonic()
        terminated: set[psutil.Process] = set()
        while (left := self.living()) and (elapsed := time.monotonic() - start) < LIMIT_S:
            workers = [process for process in left if not is_cleaner(process.pid)]
            chosen = workers or (left if elapsed > GRACE_S + 1 else [])
            if elapsed < GRACE_S:
                _signal({*chosen} - terminated, signal.SIGTERM)
                terminated |= {*chosen}
            else:
                _signal(chosen, signal.SIGSTOP)  # their new children remain theirs as long as they live
                if {*self.living()} <= {*left}:
                    _signal(chosen, signal.SIGKILL)
            time.sleep(0.1)


def member_file(directory: Path, is_worker: bool) -> Path:
    """Return the file that makes this process a member of the run with this temporary directory."""
    return directory / f"{_WORKER if is_worker else _MEMBER}{os.getpid()}.{identity(os.getpid())[1]}"


def find_workers(directory: Path) -> list[Identity]:
    """Return the Ray workers that have joined the run with this temporary directory, ended ones included."""
    return _find_joined(directory, _WORKER)


def _find_joined(directory: Path, kind: str) -> list[Identity]:
    names = [file.name.removeprefix(kind).split(".") for file in directory.glob(f"{kind}*")]
    return [(int(pid), int(started)) for pid, started in names]


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.Error):  # ended meanwhile; psutil does not signal a reused id
            process.send_signal(number)


def members(run_id: str) -> list[psutil.Process]:
    """Return the living processes of a run by their environment, without zombies."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_VARIABLE) == run_id:
                found.append(process)
        except (psutil.Error, OSError):  # ended meanwhile, a zombie, or another user's
            continue
    return found


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


if __name__ == "__main__":
    main()
