"""The lock of a run's directory: its holders, how long to wait for them, and how forks do not keep it."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from psutil import Error, Process

from areal_like.backends.ray import janitor

CLEAN_UP_S = 120.0  # that the clean-up of a run that was killed may take; it takes seconds
END_S = 15.0  # that a run may take which is just ending
FORK_S = 2.0  # for a new fork, which holds the lock for a moment
_kept: set[int] = set()


def patience(holders: Sequence[Process]) -> float:
    """Return how long to wait for the lock's holders: only a run's janitor certainly ends by itself."""
    ours = [_is_janitor(process) for process in holders]
    if all(ours):  # also where there are none, as the holder is on another host
        return CLEAN_UP_S
    return END_S if any(ours) else FORK_S


def describe_holders(holders: Sequence[Process]) -> tuple[str, str]:
    """Return who holds the lock, and how to end them; janitors end with the others."""
    chosen = [process for process in holders if not _is_janitor(process)] or holders
    ids = " ".join(str(process.pid) for process in chosen)
    return "; ".join(map(_describe, chosen)), f"End it with `kill {ids}` (`kill -9 {ids}` if that does not help)"


@contextmanager
def kept_from_forks(descriptor: int) -> Iterator[None]:
    """Release the lock in forks of this process: a fork that outlives it would keep the run's directory."""
    _kept.add(descriptor)
    try:
        yield
    finally:
        _kept.discard(descriptor)


def _describe(process: Process) -> str:
    with suppress(Error):
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(process.create_time()))
        return f"process {process.pid} (`{_command(process)[:200]}`, started {started}) holds its lock"
    return f"process {process.pid} holds its lock"


def _is_janitor(process: Process) -> bool:
    return janitor.__name__ in _command(process)


def _command(process: Process) -> str:
    with suppress(Error):
        return " ".join(process.cmdline())
    return ""


def _let_go() -> None:
    """Release the locks in a fork; the numbers stay in use, because the fork may close them once more."""
    for descriptor in _kept:
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, descriptor, inheritable=False)
        os.close(nowhere)


os.register_at_fork(after_in_child=_let_go)
