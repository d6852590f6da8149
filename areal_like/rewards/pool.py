"""A pool of killable processes: a call that exceeds its time limit fails without affecting other calls.

Each worker slot has a thread, which sends one call after another to its worker and replaces a worker that has ended.
Workers are forked from a server (`forkserver.py`) that has imported the shipped verifiers' libraries, so replacing one
takes milliseconds.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from areal_like.rewards import forkserver, worker
from areal_like.rewards.processes import Ended, ForkServer, RewardProcess, TookTooLong
from areal_like.runtime.descendants import resident_bytes

IMPORT_LIMIT_S = 60.0  # for a worker's first call to import its function, before the call's own limit starts
_SPARE_S = 5.0  # a worker's own limit ends it with a traceback; otherwise it is killed this much later
_CALLS = 10_000  # per worker, which bounds leaks of descriptors, threads and files
_FULL = 0.5  # of the memory limit; a worker that holds more between calls is replaced, which loses no reward


class Cause(StrEnum):
    """Reason why a call has no result."""

    TIMED_OUT = "timed_out"
    DIED = "died"
    RAISED = "raised"
    UNREADABLE = "unreadable"  # an answer without a score


@dataclass(frozen=True)
class Failure:
    """A call without a result; `message` is the reason in one line."""

    cause: Cause
    message: str


@dataclass(frozen=True)
class _PendingCall:
    """A pickled call that waits for a worker, and its outcome."""

    call: bytes
    handed_in: float
    outcome: Future[Any]


class RewardPool:
    """Calls functions in processes; as a context manager, plain or asynchronous, it leaves no process behind.

    `workers` is None for one per core. Time limits, in seconds, start when a worker receives a call, not when the call
    is queued; every call ends, even if its processes hang or die. A call fails if its worker and the worker's children
    exceed `memory_mb`. The output of calls goes to `log`, up to its size limit. `preload` lists modules that most calls
    need. `prepare` is a module, a caching function in it, and the function's argument; all workers share the result.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        workers: int | None = None,
        memory_mb: int | None = None,
        preload: Sequence[str] = (),
        prepare: tuple[str, str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        self._timeout_s, self._memory = timeout_s, memory_mb * 2.0**20 if memory_mb else inf
        self._command = forkserver.command([*preload, "areal_like.rewards.functions"], prepare, log)
        self._calls: SimpleQueue[_PendingCall | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name="reward worker", daemon=True)
            for _ in range(workers or len(os.sched_getaffinity(0)))
        ]
        self._lock = threading.Lock()  # of the three below
        self._server: ForkServer | None = None
        self._begun = self._ended = False
        self._waits: list[float] = []

    def begin(self) -> None:
        """Start the fork server and the threads if they are not running; otherwise the first call starts them."""
        with self._lock:
            if self._begun or self._ended:
                return
            self._begun = True
            self._server = ForkServer(self._command)
        for thread in self._threads:
            thread.start()

    async def call(self, load: Callable[[], Callable[..., Any]], *arguments: Any) -> Any | Failure:
        """Call the function that `load` returns in a worker; return its result or a failure.

        `load` is a module's own function or a `functools.partial` of one, so that a worker can import it.
        """
        return await asyncio.wrap_future(self._hand_in(load, arguments))

    def call_and_wait(self, load: Callable[[], Callable[..., Any]], *arguments: Any) -> Any | Failure:
        """Call as `call` does, for code without an event loop."""
        return self._hand_in(load, arguments).result()

    def queue_seconds(self, *, keep: bool = False) -> tuple[float, float]:
        """Return the mean and longest wait of calls for a worker since the last query; zeros if none waited.

        With `keep` the next query counts them once more.
        """
        waits, self._waits = self._waits, self._waits if keep else []
        return (sum(waits) / len(waits), max(waits)) if waits else (0.0, 0.0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Kill the worker processes at once, even with unfinished work."""
        await asyncio.to_thread(self._end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Exit as `__aexit__` does."""
        self._end()

    def _hand_in(self, load: Callable[[], Callable[..., Any]], arguments: Sequence[Any]) -> Future[Any]:
        outcome = Future[Any]()
        try:
            call = bytes(ForkingPickler.dumps((load, arguments, IMPORT_LIMIT_S, self._timeout_s)))
        except Exception as error:  # noqa: BLE001 - a user's objects pickle, or not, in any way they like
            outcome.set_result(Failure(Cause.RAISED, f"{worker.UNSENT}: {type(error).__name__}: {error}"))
            return outcome
        self.begin()
        with self._lock:
            if self._ended:
                outcome.set_result(Failure(Cause.DIED, "the pool has ended"))
            else:
                self._calls.put(_PendingCall(call, time.monotonic(), outcome))
        return outcome

    def _serve(self) -> None:
        """Send queued calls to a worker, one after another, until a None is queued."""
        process = None
        while (call := self._calls.get()) is not None:
            if not call.outcome.set_running_or_notify_cancel():
                continue
            outcome: Any
            try:
                process = process or self._fork()
                outcome = self._answer(process, call)
                if self._is_spent(process):
                    process.end()
                    process = None
            except Ended as ended:
                process, outcome = None, Failure(Cause.DIED, f"its process died ({ended.how})")
            except TookTooLong:
                process, outcome = None, Failure(Cause.TIMED_OUT, f"it took more than {self._timeout_s:g} s")
            call.outcome.set_result(outcome)
        if process:
            process.end()

    def _answer(self, process: RewardProcess, call: _PendingCall) -> Any | Failure:
        """Return the result of the call; raise Ended or TookTooLong."""
        taken_up = time.monotonic()
        self._waits.append(taken_up - call.handed_in)
        try:
            answer = process.call(call.call, IMPORT_LIMIT_S + self._timeout_s + _SPARE_S, self._memory)
        except Ended as ended:
            if ended.code == worker.TIMED_OUT and time.monotonic() - taken_up >= self._timeout_s:
                raise TookTooLong from ended
            raise
        try:
            value, error = ForkingPickler.loads(answer)
        except Exception as unusable:  # noqa: BLE001 - as above
            return Failure(Cause.RAISED, f"{worker.UNSENT}: {type(unusable).__name__}: {unusable}")
        return value if error is None else Failure(Cause.RAISED, error)

    def _is_spent(self, process: RewardProcess) -> bool:
        return process.calls >= _CALLS or resident_bytes([process.pid]) > _FULL * self._memory

    def _fork(self) -> RewardProcess:
        """Fork a new worker; raise Ended."""
        server = self._living_server()
        try:
            return server.fork()
        except Ended:
            if server.lives():
                raise
            return self._living_server().fork()

    def _living_server(self) -> ForkServer:
        """Return the fork server, or a new one if it has ended; raise Ended."""
        with self._lock:
            if self._ended or self._server is None:
                raise Ended("the pool has ended")
            if not self._server.lives():
                self._server.stop()
                self._server = ForkServer(self._command)
            return self._server

    def _end(self) -> None:
        with self._lock:
            self._ended, server = True, self._server
        if server is not None:
            server.stop()
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads if self._begun else ():
            thread.join()
