"""A killable pool: a call that does not end in time fails alone, and costs its neighbours nothing.

Each place for a worker has a thread, which hands one call after another to the worker there and replaces it when it has
ended. Workers are forked from a server (`forkserver.py`) that has imported the shipped verifiers' libraries: to replace
one takes milliseconds.
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
from areal_like.rewards.processes import Ended, ForkServer, TookTooLong, Worker
from areal_like.runtime.descendants import resident_bytes

IMPORT_LIMIT_S = 60.0  # for a worker's first call to load what it calls, before its own limit begins
_SPARE_S = 5.0  # a worker ends by its own limits, which leave a traceback; this much later it is killed
_CALLS = 10_000  # of one worker: what leaks descriptors, threads or files does not do so for a whole run
_FULL = 0.5  # of the memory limit: a worker that keeps more between two calls is replaced, which costs no reward


class Cause(StrEnum):
    """Why a call gave nothing."""

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
class _Call:
    """A pickled call that waits for a worker, and its outcome."""

    call: bytes
    handed_in: float
    outcome: Future[Any]


class RewardPool:
    """Calls functions in processes; used as a context, plain or asynchronous, it leaves no process behind.

    `workers` is None for one per core. Time limits, in seconds, count from when a worker takes up a call, not from when
    it is handed in; every call ends, whatever the processes do. A call whose worker takes more than `memory_mb`, its
    children included, fails. What calls print goes to `log`, as far as it has room. `preload` are modules that most
    calls need, `prepare` is a module, a function of it that caches, and its argument: workers share what it makes.
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
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name="reward worker", daemon=True)
            for _ in range(workers or len(os.sched_getaffinity(0)))
        ]
        self._lock = threading.Lock()  # of the three below
        self._server: ForkServer | None = None
        self._begun = self._ended = False
        self._waits: list[float] = []

    def begin(self) -> None:
        """Start fork server and threads, unless that was done; else the first call does."""
        with self._lock:
            if self._begun or self._ended:
                return
            self._begun = True
            self._server = ForkServer(self._command)
        for thread in self._threads:
            thread.start()

    async def call(self, load: Callable[[], Callable[..., Any]], *arguments: Any) -> Any | Failure:
        """Return what the function that `load` gives in a worker returns, or why there is nothing.

        `load` is a module's own function or a `functools.partial` of one, so that a worker can import it.
        """
        return await asyncio.wrap_future(self._hand_in(load, arguments))

    def call_and_wait(self, load: Callable[[], Callable[..., Any]], *arguments: Any) -> Any | Failure:
        """Call as `call` does, for code without an event loop."""
        return self._hand_in(load, arguments).result()

    def queue_seconds(self) -> tuple[float, float]:
        """Mean and longest time that calls waited for a worker since this was last asked; zeros where none had to."""
        waits, self._waits = self._waits, []
        return (sum(waits) / len(waits), max(waits)) if waits else (0.0, 0.0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the worker processes at once, unfinished work included."""
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
                self._calls.put(_Call(call, time.monotonic(), outcome))
        return outcome

    def _serve(self) -> None:
        """Have workers answer calls, one after another, until there is a None in their place."""
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

    def _answer(self, process: Worker, call: _Call) -> Any | Failure:
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

    def _is_spent(self, process: Worker) -> bool:
        return process.calls >= _CALLS or resident_bytes([process.pid]) > _FULL * self._memory

    def _fork(self) -> Worker:
        """Fork a new worker; raise Ended."""
        server = self._living_server()
        try:
            return server.fork()
        except Ended:
            if server.lives():
                raise
            return self._living_server().fork()

    def _living_server(self) -> ForkServer:
        """Return the fork server, or a new one where it has ended; raise Ended."""
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
