"""Worker processes that run calls of user code, seen from the main process.

A call that ends its worker, or has to be ended with it, fails with EndedWorker. The other calls of that worker are
begun again on others; where it is not certain whose code it was, those that may have been run alone in a worker.
"""

import asyncio
import itertools
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from contextlib import AbstractAsyncContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from areal_like.errors import RunError
from areal_like.runtime import warden, watch
from areal_like.runtime import worker as worker_module
from areal_like.runtime.descendants import resident_bytes
from areal_like.runtime.frames import CALL_NUMBER, Frames, Kind
from areal_like.runtime.marks import Marks, shared_memory
from areal_like.runtime.remote import Attempt, Call, Lane, Worker
from areal_like.runtime.worker import END_S, FAILED, Settings

START_S = 300.0  # for a worker to import what it runs
TICK_S = 0.1
LEFT_S = 30.0  # for the code of a call that is over to end
LOST_S = 5.0  # for a worker to end whose connection was closed
WARDEN_S = 10.0  # for the warden to kill everything
LOG_BYTES = 64 << 20  # a larger log begins anew
MOST_STARTS = 3  # in a row that fail
MOST_TIMES = 3  # that a call is begun again beside others
NUMBERS = itertools.count(1)


class TimeLimit(Exception):
    """A call did not end within its limit."""


class CancelledWithin(Exception):
    """A call was cancelled by its own code."""


class EndedWorker(Exception):
    """A call has ended its worker, or blocked it: `cause` is a word that is counted, the message says more."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


async def in_loop[T](loop: asyncio.AbstractEventLoop, body: Coroutine[Any, Any, T]) -> T:
    """Have the loop of another thread run a coroutine; it is cancelled with this one."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(body, loop))


class _Interrupted(Exception):
    """The worker ended by the code of another call; `suspect` says that it may have been this one's."""

    def __init__(self, suspect: bool) -> None:
        self.suspect = suspect


@dataclass(frozen=True)
class Limits:
    """How many workers there are, event loops in each, and what ends a worker."""

    workers: int
    loops: int
    blocked_s: float
    memory_mb: int | None = None


class UserProcesses(AbstractAsyncContextManager["UserProcesses"]):
    """A fixed number of worker processes; `async with` starts them without waiting and ends them with all they started.

    `entry` and `start` are those of Settings. What calls print goes to `log`; `say` is told what users should know, in
    another thread. Connections are served by a thread with an event loop of its own, so that neither side waits for the
    loop of the run.
    """

    def __init__(
        self, entry: str, start: bytes, limits: Limits, say: Callable[[str], object], log: Path | None = None
    ) -> None:
        self._settings = Settings(tuple(sys.path), entry, start)
        self.limits, self._say, self._log = limits, say, log
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="user processes", daemon=True)
        self._workers: list[Worker] = []
        self._names = itertools.count()
        self._replaced: Counter[str] = Counter()
        self._failed_starts = 0
        self._failure: RunError | None = None
        self._closing = False
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        self._thread.start()
        await in_loop(self._loop, self._open())
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(in_loop(self._loop, self._close()))
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)

    async def call(self, begin: Callable[[], Attempt], timeout_s: float) -> bytes:
        """Return what a call gives, within `timeout_s` from when a worker has it.

        `begin` is asked for an Attempt each time that it is begun, in the thread of the workers. Raises TimeLimit,
        CancelledWithin, EndedWorker, and RunError where no worker starts.
        """
        return await in_loop(self._loop, self._call(begin, timeout_s))

    @property
    def pids(self) -> list[int]:
        """The processes of the workers that run calls now."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _open(self) -> None:
        self._changed = asyncio.Event()
        self._alone = asyncio.Semaphore(self.limits.workers)
        self._idle: list[Worker] = []  # for suspects
        self._suspects = 0  # that wait
        self._files = ExitStack()
        if self._log is None:
            self._log = Path(self._files.enter_context(tempfile.TemporaryDirectory(prefix="areal-"))) / "workers.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._warden = subprocess.Popen(
                [*_program(warden.__name__), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        ours.setblocking(False)
        self._control = ours
        self._described = os.memfd_create("areal-like-settings")
        os.write(self._described, pickle.dumps(self._settings))
        self._loop.add_reader(ours, self._hear)
        for _ in range(self.limits.workers):
            await self._start()
        self._spawn(self._watch())

    async def _close(self) -> None:
        self._closing = True
        for worker in self._workers:
            for lane in worker.lanes:
                lane.frames.send(Kind.END, 0)
        limit = time.monotonic() + END_S + 1
        while any(worker.ready for worker in self._workers) and time.monotonic() < limit:
            await asyncio.sleep(TICK_S / 5)
        self._loop.remove_reader(self._control)
        self._control.close()  # the warden kills what is left
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._warden.wait, WARDEN_S)
        self._warden.kill()
        for task in self._tasks:
            task.cancel()
        for worker in list(self._workers):
            self._end(worker)
        os.close(self._described)
        self._files.close()

    def _spawn(self, body: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._loop.create_task(body)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # calls

    async def _call(self, begin: Callable[[], Attempt], timeout_s: float) -> bytes:
        times, suspect = 0, False
        while True:
            try:
                if suspect or times >= MOST_TIMES:
                    return await self._call_alone(begin, timeout_s)
                return await self._on(*await self._free_lane(), begin, timeout_s)
            except _Interrupted as interrupted:
                times, suspect = times + 1, interrupted.suspect

    async def _call_alone(self, begin: Callable[[], Attempt], timeout_s: float) -> bytes:
        """Run a call in a worker that has no other one meanwhile; the next suspect gets it if it is as it was."""
        self._suspects += 1
        async with self._alone:
            self._suspects -= 1
            worker = self._idle.pop() if self._idle else await self._start(alone=True)
            try:
                while not worker.ready or worker.over:
                    self._raise_failure()
                    if worker.over:
                        raise _Interrupted(suspect=True)
                    await self._change()
                return await self._on(worker, worker.lanes[0], begin, timeout_s)
            finally:
                if self._suspects and not (worker.over or worker.left or worker.marks.running()):
                    self._idle.append(worker)
                else:
                    self._end(worker)

    async def _free_lane(self) -> tuple[Worker, Lane]:
        """The event loop with the fewest calls, once one is ready."""
        while True:
            self._raise_failure()
            workers = [each for each in self._workers if each.ready and not each.retires and not each.alone]
            lanes = [(worker, lane) for worker in workers for lane in worker.lanes]
            if lanes:
                return min(lanes, key=lambda pair: len(pair[1].calls))
            await self._change()

    async def _on(self, worker: Worker, lane: Lane, begin: Callable[[], Attempt], timeout_s: float) -> bytes:
        call = Call(next(NUMBERS), begin(), self._loop.create_future())
        lane.calls[call.number] = call
        lane.frames.send(Kind.CALL, call.number, call.attempt.request)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                result = await call.result
        except TimeoutError as error:
            raise TimeLimit if limit.expired() else error from error
        finally:
            del lane.calls[call.number]
            for answering in list(call.answers.values()):
                answering.cancel()
            if not call.result.done() or call.result.cancelled():
                worker.left[call.number] = time.monotonic()
                lane.frames.send(Kind.CANCEL, call.number)
            if worker.retires and not worker.calls:
                self._end(worker)
        if not result:
            raise CancelledWithin
        return result

    async def _change(self) -> None:
        """Wait until something has become of a worker."""
        self._changed.clear()
        await self._changed.wait()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # workers

    async def _start(self, *, alone: bool = False) -> Worker:
        """Ask for a worker; it is ready once its loops say so."""
        shared = shared_memory()
        worker = Worker(next(self._names), alone, Marks(shared))
        descriptors, theirs = [self._described, shared], list[socket.socket]()
        for _ in range(1 if alone else self.limits.loops):
            for blocking in (False, True):
                ours, its = socket.socketpair()
                ours.setblocking(False)
                theirs.append(its)
                descriptors.append(its.fileno())
                lane = Lane(frames=Frames(lambda *_: None, lambda: None)) if not blocking else worker.lanes[-1]
                connection = Frames(partial(self._on_frame, worker, lane, blocking), partial(self._lost, worker))
                if not blocking:
                    lane.frames = connection
                    worker.lanes.append(lane)
                worker.connections.append(connection)
                await self._loop.create_connection(partial(_itself, connection), sock=ours)
        self._workers.append(worker)
        command = [*_program(worker_module.__name__), str(self._warden.pid)]
        request = {"start": worker.name, "command": command, "log": str(self._log)}
        try:
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
        except OSError:
            self._fail("the process that keeps the workers of the workflow has ended")
        finally:
            os.close(shared)
            for end in theirs:
                end.close()
        return worker

    def _hear(self) -> None:
        """Take in what the warden says."""
        try:
            packet = self._control.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._loop.remove_reader(self._control)
            self._fail("the process that keeps the workers of the workflow has ended")
            return
        message = json.loads(packet)
        name = message.get("started", message.get("ended"))
        worker = next((each for each in self._workers if each.name == name), None)
        if worker is None:
            return
        if "pid" in message:
            worker.pid = message["pid"]
            with suppress(ProcessLookupError):
                worker.handle = os.pidfd_open(message["pid"])
        else:
            self._ended(worker, message["status"], message.get("why", ""))

    def _ended(self, worker: Worker, status: int | None, why: str) -> None:
        """A worker has ended by itself."""
        if self._closing or worker.over:
            self._end(worker)
            return
        how = why or watch.described(status)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= MOST_STARTS:
                self._fail(f"{MOST_STARTS} workers of the workflow in a row did not start ({how}); output: {self._log}")
            message, guilty, suspects = f"its process did not start ({how})", set[int](), set[int]()
        else:  # one whose loops stand still (FAILED) does so after the code that broke them
            message, marked = f"its process ended ({how})", set(worker.marks.running().values())
            suspects = worker.marks.ran_last() if status == FAILED else marked
            guilty = suspects if len(suspects) == 1 and status != FAILED else set()
        self._fault(worker, "died", message, guilty, suspects)

    def _lost(self, worker: Worker) -> None:
        """A connection was closed; the process should end soon."""

        async def insist() -> None:
            await asyncio.sleep(LOST_S)
            if not worker.over:
                message = "its connection to the run was closed"
                self._fault(worker, "died", message, set(), worker.marks.ran_last())

        if not worker.over and not self._closing and worker.ready:
            self._spawn(insist())

    def _fault(
        self, worker: Worker, cause: str, message: str, guilty: Collection[int], suspects: Collection[int]
    ) -> None:
        """Replace a worker, charge the guilty calls, and have the others begun again."""
        if worker.over:
            return
        calls = worker.calls
        guilty = set(calls) if worker.alone else set(guilty) & set(calls)
        again = len(calls) - len(guilty)
        self._end(worker)
        for number, call in calls.items():
            if call.result.done():
                continue
            if number in guilty:
                call.result.set_exception(EndedWorker(cause, message))
            else:
                call.result.set_exception(_Interrupted(number in suspects and not guilty))
        self._replaced[cause] += bool(calls)
        if calls and (times := self._replaced[cause]).bit_count() == 1:  # the first, second, fourth, eighth, ...
            more = f"; {again} other calls start again" if again else ""
            often = f" ({times} times so far)" if times > 1 else ""
            self._say(f"a worker of the workflow was replaced{often}: {message}{more}; its output: {self._log}")

    def _end(self, worker: Worker) -> None:
        """End a worker, and begin another one in its place."""
        if worker.over:
            return
        worker.over = True
        with suppress(ValueError):
            self._workers.remove(worker)
        for connection in worker.connections:
            connection.close()
        if worker.handle is not None:
            os.close(worker.handle)
            worker.handle = None
        with suppress(OSError):
            self._control.send(json.dumps({"kill": worker.name}).encode())
        if not (self._closing or worker.alone or worker.retires or self._failure):
            self._spawn(self._start())
        self._changed.set()

    def _retire(self, worker: Worker) -> None:
        """Give a worker no more calls: the code of one that was cancelled goes on in it."""
        if any(each.retires for each in self._workers) or worker.alone:
            return  # one after the other
        worker.retires = True
        self._spawn(self._start())
        self._say(
            "the code of an episode that was cancelled goes on in its worker, as in a thread, which nothing can end: the "
            f"worker is replaced when its other episodes have ended; its output: {self._log}"
        )
        if not worker.calls:
            self._end(worker)

    def _fail(self, message: str) -> None:
        self._failure = RunError(message)
        for worker in list(self._workers):
            for call in worker.calls.values():
                if not call.result.done():
                    call.result.set_exception(self._failure)
        self._changed.set()

    # messages

    def _on_frame(self, worker: Worker, lane: Lane, blocking: bool, kind: Kind, number: int, body: bytes) -> None:
        if kind == Kind.READY:
            lane.place = number
            if worker.ready:
                self._failed_starts = 0
                self._changed.set()
        elif kind == Kind.DONE:
            worker.left.pop(number, None)
            if (call := lane.calls.get(number)) is not None and not call.result.done():
                call.result.set_result(body)
        elif kind == Kind.ASK:
            (of_call,) = CALL_NUMBER.unpack_from(body)
            connection = worker.connections[2 * worker.lanes.index(lane) + blocking]
            asking = lane.calls.get(of_call)
            answering = self._spawn(self._answer(connection, asking, number, body[CALL_NUMBER.size :]))
            if asking is not None:
                asking.answers[number] = answering
        elif kind == Kind.DROP:
            for each in lane.calls.values():
                if number in each.answers:
                    each.answers[number].cancel()

    async def _answer(self, connection: Frames, call: Call | None, number: int, body: bytes) -> None:
        method, _, question = body.partition(b"\n")
        try:
            answer = (
                b"-the episode is over" if call is None else b"+" + await call.attempt.answer(method.decode(), question)
            )
        except Exception as error:  # noqa: BLE001 - of whatever the user's code has asked for
            answer = f"-{error or type(error).__name__}".encode()
        finally:
            if call is not None:
                call.answers.pop(number, None)
        connection.send(Kind.ANSWER, number, answer)

    # watching

    async def _watch(self) -> None:
        """Look after every worker now and then; only time in which this process ran by itself counts."""
        last = time.monotonic()
        for ticks in itertools.count():
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            passed, last = min(now - last, 2 * TICK_S), now
            for worker in list(self._workers):
                if not worker.ready:
                    if now - worker.began > START_S and not worker.over:
                        self._ended(worker, None, f"not ready after {START_S:g} s")
                    continue
                watch.note_beats(worker, passed)
                await self._judge(worker, descendants=ticks % 10 == 0)
            if self._log is not None and self._log.exists() and self._log.stat().st_size > LOG_BYTES:
                os.truncate(self._log, 0)

    async def _judge(self, worker: Worker, *, descendants: bool) -> None:
        if self.limits.memory_mb is not None and worker.pid is not None:
            self._judge_memory(worker, worker.pid, self.limits.memory_mb, descendants=descendants)
        watch.continue_stopped(worker)
        if not worker.over and (stale := watch.stands_still(worker, self.limits.blocked_s)) is not None:
            await self._blocked(worker, stale)
        if worker.over:
            return
        now, calls = time.monotonic(), worker.calls
        running = {call for call in worker.marks.running().values() if call not in calls}
        worker.strays = {call: worker.strays.get(call, now) for call in running}
        if any(now - since > LEFT_S for since in [*worker.left.values(), *worker.strays.values()]):
            self._retire(worker)

    def _judge_memory(self, worker: Worker, pid: int, limit_mb: int, *, descendants: bool) -> None:
        if resident_bytes([pid]) > limit_mb * watch.MB:
            marked = set(worker.marks.running().values())
            message = f"its process has more than {limit_mb} MB (episode.memory_mb)"
            self._fault(worker, "memory", message, marked if len(marked) == 1 else set(), marked)
        elif descendants and (killed := watch.kill_large_descendants(pid, limit_mb)):
            self._say(f"a program that a workflow has started was killed: {killed} (episode.memory_mb: {limit_mb})")

    async def _blocked(self, worker: Worker, stale: list[Lane]) -> None:
        """Find out whose code it is, have the stacks written, and replace the worker."""
        assert self._log is not None  # for the type checker
        guilty, suspects = await watch.whose(worker, stale)
        where = await watch.dumped(worker, guilty, self._log)
        message = f"it blocked its event loop for more than {self.limits.blocked_s:g} s (episode.blocked_s){where}"
        self._fault(worker, "blocked", message, guilty, suspects)


def _program(module: str) -> list[str]:
    """The command that runs a module of this project, wherever that is imported from."""
    root = str(Path(__file__).parents[2])
    return [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {root!r}); import {module} as it; it.main()"]


def _itself(connection: Frames) -> Frames:
    return connection
