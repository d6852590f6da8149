"""Handles in the main process of worker processes that run user code.

A call that ends its worker, or must be ended with the worker, fails with EndedWorker. The worker's other calls restart
on other workers. If the responsible call is not certain, each suspect runs alone in a worker.
"""

import asyncio
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, ExitStack
from pathlib import Path
from typing import Any, Self

from areal_like.capabilities.agents.workers.frames import Kind, NotPlain, plain
from areal_like.capabilities.agents.workers.remote import Call, CallStart, Interrupted, Lane, Worker, WorkerLimits
from areal_like.capabilities.agents.workers.watch import watch
from areal_like.capabilities.agents.workers.worker import WorkerSettings
from areal_like.capabilities.agents.workers.workers import Workers

LEAST_S = 0.1
MOST_TIMES = 3  # restarts of a call beside other calls
NUMBERS = itertools.count(1)

type Outcome = tuple[Any, ...]
"""A handler's unpickled result; the first item tells whether the call succeeded."""


class TimeLimit(Exception):
    """A call did not end within its limit."""


class CancelledWithin(Exception):
    """A call was cancelled by its own code."""


async def in_loop[T](loop: asyncio.AbstractEventLoop, body: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the loop of another thread; it is cancelled with this one."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(body, loop))


class UserProcesses(AbstractAsyncContextManager["UserProcesses"]):
    """A fixed number of worker processes; `async with` starts them without waiting and ends them with their children.

    WorkerSettings define `entry` and `start`. The output of calls goes to `log`; `say` receives messages for the user,
    in another thread. A thread with its own event loop serves the connections, so that neither side waits for the loop
    of the run.
    """

    def __init__(
        self, entry: str, start: bytes, limits: WorkerLimits, say: Callable[[str], object], log: Path | None = None
    ) -> None:
        self._settings = WorkerSettings(tuple(sys.path), entry, start, limits.memory_mb)
        self._limits, self._say, self._log = limits, say, log
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="user processes", daemon=True)

    async def __aenter__(self) -> Self:
        self._thread.start()
        await in_loop(self._loop, self._open())
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(in_loop(self._loop, self._close()))
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)

    async def call(self, begin: Callable[[], CallStart], timeout_s: float) -> Outcome:
        """Return a call's outcome; `timeout_s` starts when a worker receives the call.

        `begin` returns an Attempt for each start, in the workers' thread. Raises TimeLimit, CancelledWithin,
        EndedWorker, NotPlain, and RunError if no worker starts.
        """
        return await in_loop(self._loop, self._call(begin, timeout_s))

    @property
    def pids(self) -> list[int]:
        """Return the process ids of workers that run calls now."""
        return [worker.pid for worker in self._workers.all if worker.pid is not None]

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _open(self) -> None:
        self._alone = asyncio.Semaphore(self._limits.workers)
        self._idle: list[Worker] = []  # for suspects
        self._suspects = 0  # waiting
        self._files = ExitStack()
        log = self._log
        if log is None:
            log = Path(self._files.enter_context(tempfile.TemporaryDirectory(prefix="areal-"))) / "workers.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        self._workers = Workers(self._settings, self._limits, log, self._say)
        for _ in range(self._limits.workers):
            await self._workers.start()
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        try:
            await watch(self._workers)
        except Exception as error:  # noqa: BLE001 - without the watch a worker may stand still for ever
            self._workers.fail(f"the watch over the workers of the workflow has failed: {error!r}")

    async def _close(self) -> None:
        self._watching.cancel()
        await self._workers.close()
        self._files.close()

    async def _call(self, begin: Callable[[], CallStart], timeout_s: float) -> Outcome:
        times, suspect = 0, False
        while True:
            try:
                if suspect or times >= MOST_TIMES:
                    return await self._call_alone(begin, timeout_s)
                return await self._call_on(*await self._free_lane(), begin, timeout_s)
            except Interrupted as interrupted:
                times, suspect = times + 1, interrupted.suspect

    async def _call_alone(self, begin: Callable[[], CallStart], timeout_s: float) -> Outcome:
        """Run a call alone in a worker; the next suspect uses the same worker if it is unharmed."""
        self._suspects += 1
        try:
            await self._alone.acquire()
        finally:
            self._suspects -= 1
        try:
            return await self._on_own_worker(begin, timeout_s)
        finally:
            self._alone.release()

    async def _on_own_worker(self, begin: Callable[[], CallStart], timeout_s: float) -> Outcome:
        worker = self._idle.pop() if self._idle else await self._workers.start(alone=True)
        try:
            while not worker.ready or worker.over:
                self._workers.raise_failure()
                if worker.over:
                    raise Interrupted(suspect=True)
                await self._workers.change()
            return await self._call_on(worker, worker.lanes[0], begin, timeout_s)
        finally:
            if self._suspects and not (worker.over or worker.left or worker.marks.running()):
                self._idle.append(worker)
            else:
                self._workers.end(worker)

    async def _free_lane(self) -> tuple[Worker, Lane]:
        """Return the event loop with the fewest calls under way or failed lately, once one is ready.

        A worker whose last calls failed is the last choice, because it may be broken.
        """
        while True:
            self._workers.raise_failure()
            workers = [each for each in self._workers.all if each.ready and not each.retires and not each.alone]
            lanes = [(worker, lane) for worker in workers for lane in worker.lanes]
            if lanes:
                return min(lanes, key=lambda pair: (pair[0].is_suspect, pair[1].load))
            await self._workers.change()

    async def _call_on(self, worker: Worker, lane: Lane, begin: Callable[[], CallStart], timeout_s: float) -> Outcome:
        call = Call(next(NUMBERS), begin(), self._loop.create_future())
        lane.calls[call.number], failed = call, None
        lane.frames.send(Kind.CALL, call.number, call.attempt.request)
        try:
            result = await self._limit(call.result, lane, timeout_s)
            outcome = plain(result) if result else (False,)
            failed = not outcome[0]
        except TimeLimit:
            failed = True
            raise
        except (NotPlain, LookupError, TypeError) as error:
            failed = True
            raise NotPlain(str(error)) from error
        finally:
            del lane.calls[call.number]
            for answering in list(call.answers.values()):
                answering.cancel()
            if not call.result.done() or call.result.cancelled():
                worker.left[call.number] = time.monotonic()
                lane.frames.send(Kind.CANCEL, call.number)
            if worker.retires and not worker.calls:
                self._workers.end(worker)
            if failed is not None:
                self._workers.note_outcome(worker, lane, failed=failed)
            del call  # as in `_limit`
        if not result:
            raise CancelledWithin
        return outcome

    async def _limit(self, result: asyncio.Future[bytes], lane: Lane, timeout_s: float) -> bytes:
        """Wait for a result, not counting time when its loop was blocked, for example by another call's code."""
        began, stood_still = time.monotonic(), lane.stood_still_s
        left_s = timeout_s
        while not result.done():
            await asyncio.wait((result,), timeout=max(left_s, LEAST_S))
            left_s = timeout_s - (time.monotonic() - began) + (lane.stood_still_s - stood_still)
            if left_s <= 0 and not result.done():
                raise TimeLimit
        try:
            return result.result()
        finally:
            del result  # its error has this frame: a cycle
