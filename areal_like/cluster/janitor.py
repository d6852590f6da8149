"""The last process of a run: waits for the process that started it to end, then removes what the run left.

Run as a module, `python -m areal_like.cluster.janitor RUN_ID DIRECTORY...`, with two pipes. Nothing is written to
standard input, which ends when its owner closes it or dies, SIGKILL included; standard output ends when all is done. A
member of the run is a process whose environment had `AREAL_LIKE_RUN=RUN_ID` at its start.
"""

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable

import psutil

from areal_like.cluster.shared_memory import SharedMemoryWatch

RUN_VARIABLE = "AREAL_LIKE_RUN"
GRACE_S = 2.0  # between SIGTERM and SIGKILL
LIMIT_S = 60.0  # what SIGKILL does not end by then waits for the system
# These outlive their clients for a moment to unlink shared memory, and end by themselves.
CLEANERS = ("resource_tracker", "torch_shm_manager")


def main() -> None:
    """Wait for the owner's end, then clean up."""
    run_id, *directories = sys.argv[1:]
    owner = psutil.Process(os.getppid())
    if os.fork():  # Ray kills the children of a worker that ends
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    shared_memory, owners = SharedMemoryWatch(), SharedMemoryWatch()

    def look() -> None:
        shared_memory.look(lambda: members(run_id))
        owners.look(lambda: filter(_lives, [owner]))  # its pid may be another's by now

    # A child that the owner forked without exec also holds the pipe, so its end alone would not do.
    while not select.select([sys.stdin], [], [], 0.2)[0] and _lives(owner):
        look()
    look()
    end_members(run_id, spared={os.getpid(), owner.pid})
    shared_memory.remove()
    if not _lives(owner):  # one that lives may go on with its own; one that was killed with its tracker leaves them
        owners.remove()
    for directory in directories:  # last, for a member might write on
        shutil.rmtree(directory, ignore_errors=True)


def members(run_id: str, spared: Iterable[int] = ()) -> list[psutil.Process]:
    """The living processes of a run, zombies not counted."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_VARIABLE) == run_id and process.pid not in spared:
                found.append(process)
        except (psutil.Error, OSError):  # ended meanwhile, a zombie, or another user's
            continue
    return found


def end_members(run_id: str, spared: Iterable[int] = ()) -> None:
    """Terminate, then kill, until no member is left or LIMIT_S seconds have passed."""
    start = time.monotonic()
    terminated: set[int] = set()
    while (left := members(run_id, spared)) and (elapsed := time.monotonic() - start) < LIMIT_S:
        workers = [process for process in left if not _is_cleaner(process)]
        for process in workers or (left if elapsed > GRACE_S + 1 else []):
            try:
                if elapsed > GRACE_S:
                    process.kill()
                elif process.pid not in terminated:
                    process.terminate()
            except psutil.Error:
                continue
            terminated.add(process.pid)
        time.sleep(0.1)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _is_cleaner(process: psutil.Process) -> bool:
    try:
        return any(name in " ".join(process.cmdline()) for name in CLEANERS)
    except psutil.Error:
        return False


if __name__ == "__main__":
    main()
