"""A killable pool: a call that does not end in time fails alone, and costs its neighbours nothing.

Workers are forked from multiprocessing's forkserver, which has imported the shipped verifiers' libraries: to replace
one that was killed takes milliseconds. The forkserver starts with the first pool that begins, and ends with this
process. It is one for all pools of a process and keeps what the first of them preloaded.
"""

import asyncio
import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from pickle import PicklingError
from typing import Any, Literal, Self

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from areal_like.rewards import worker

IMPORT_LIMIT_S = 60.0  # for a worker's first call to load what it calls, before its own limit begins
_OF_RESULTS = (PicklingError, TypeError, AttributeError, ValueError)  # that a worker cannot send


class Cause(StrEnum):
    """Why a call gave nothing."""

    TIMED_OUT = "timed_out"
    DIED = "died"
    RAISED = "raised"


@dataclass(frozen=True)
class Failure:
    """A call that gave nothing; `message` says why in one line."""

    cause: Cause
    message: str


class RewardPool:
    """Calls functions in processes; used as a context, plain or asynchronous, it leaves no worker behind.

    `workers` is None for one per core. Time limits, in seconds, count from when a worker takes up a call, not from when
    it is handed in. What calls print goes to `log`, as far as it has room. `preload` are modules that most calls need.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        workers: int | None = None,
        preload: Sequence[str] = (),
        log: Path | None = None,
        start_method: Literal["forkserver", "spawn"] = "forkserver",
    ) -> None:
        self._timeout_s, self._preload = timeout_s, preload
        self._pool = ProcessPool(
            max_workers=workers or len(os.sched_getaffinity(0)),
            initializer=_start_worker,
            initargs=(tuple(preload), log),
            context=multiprocessing.get_context(start_method),
        )
        self._starting: asyncio.Future[None] | None = None
        self._waits: list[float] = []
        self._groups: set[int] = set()  # process groups of workers that had calls

    def begin(self) -> asyncio.Future[None]:
        """Start forkserver and workers, unless that was done; else the first call does."""
        if self._starting is None:  # in a thread: it waits for the forkserver's imports
            self._starting = asyncio.ensure_future(asyncio.to_thread(self._start))
        return self._starting

    async def call(self, load: Callable[[], Callable[..., Any]], *arguments: Any) -> Any | Failure:
        """What the function that `load` gives in a worker returns, or why there is nothing.

        `load` is a module's own function or a `functools.partial` of one, so that a worker can import it.
        """
        await asyncio.shield(self.begin())
        handed_in, future = time.monotonic(), self._schedule(load, arguments)
        if isinstance(future, Failure):
            return future
        with suppress(FutureTimeoutError, ProcessExpired, *_OF_RESULTS):
            await asyncio.wrap_future(future)
        return self._outcome(future, handed_in)

    def call_and_wait(self, load: Callable[[], Callable[..., Any]], *arguments: Any) -> Any | Failure:
        """As `call`, for code without an event loop."""
        self._start()
        handed_in, future = time.monotonic(), self._schedule(load, arguments)
        if isinstance(future, Failure):
            return future
        wait([future])
        return self._outcome(future, handed_in)

    def queue_seconds(self) -> tuple[float, float]:
        """Mean and longest time that calls waited for a worker since this was last asked; zeros where none had to."""
        waits, self._waits = self._waits, []
        return (sum(waits) / len(waits), max(waits)) if waits else (0.0, 0.0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the worker processes at once, unfinished work included."""
        if self._starting is not None:
            await asyncio.wait([self._starting])
        self._pool.stop()
        await asyncio.to_thread(self._end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """As `__aexit__`."""
        self._pool.stop()
        self._end()

    def _start(self) -> None:
        """Start forkserver and workers."""
        multiprocessing.set_forkserver_preload([*self._preload, "areal_like.rewards.functions", __name__])
        self._pool.schedule(os.getpid)  # the first task starts the workers

    def _schedule(
        self, load: Callable[[], Callable[..., Any]], arguments: Sequence[Any]
    ) -> ProcessFuture[Any] | Failure:
        """A call under way; as bytes, since pebble's threads and workers end with errors that they do not expect."""
        try:
            call = bytes(ForkingPickler.dumps((load, arguments)))
        except Exception as error:  # noqa: BLE001 - a user's objects pickle, or not, in any way they like
            return Failure(Cause.RAISED, f"{worker.UNSENT}: {type(error).__name__}: {error}")
        task = (call, IMPORT_LIMIT_S, self._timeout_s)
        last_resort = IMPORT_LIMIT_S + self._timeout_s + 5  # the worker's own limits come first, unless it was stopped
        return self._pool.schedule(worker.work, args=task, timeout=last_resort)

    def _outcome(self, future: ProcessFuture[Any], handed_in: float) -> Any | Failure:
        """What a finished call gave; what was started by a worker that died is ended."""
        now, limit = time.monotonic(), f"it took more than {self._timeout_s:g} s"
        try:
            group, taken_up, value, error = future.result()
        except FutureTimeoutError:
            return Failure(Cause.TIMED_OUT, limit)
        except ProcessExpired as expired:
            _end_group(expired.pid)
            if expired.exitcode != worker.TIMED_OUT or now - handed_in < self._timeout_s:
                return Failure(Cause.DIED, f"its process died ({_how(expired.exitcode)})")
            self._waits.append(max(0.0, now - self._timeout_s - handed_in))
            return Failure(Cause.TIMED_OUT, limit)
        except _OF_RESULTS as unpicklable:  # `work` itself raises nothing
            return Failure(Cause.RAISED, f"{worker.UNSENT}: {unpicklable}")
        self._groups.add(group)
        self._waits.append(taken_up - handed_in)
        return value if error is None else Failure(Cause.RAISED, error)

    def _end(self) -> None:
        self._pool.join()
        for group in self._groups:
            _end_group(group)


def _start_worker(preload: Sequence[str], log: Path | None) -> None:
    worker.start(log)
    for module in preload:  # at once, unless the forkserver keeps what another pool preloaded
        importlib.import_module(module)


def _end_group(group: int) -> None:
    """End what is left of a worker's process group."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _how(exitcode: int) -> str:
    return f"exit code {exitcode}" if exitcode >= 0 else signal.Signals(-exitcode).name
