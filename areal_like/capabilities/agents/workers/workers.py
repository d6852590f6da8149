"""The workers: their start, their end, and their messages."""

import asyncio
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from areal_like.capabilities.agents.workers import warden
from areal_like.capabilities.agents.workers import worker as worker_module
from areal_like.capabilities.agents.workers.frames import CALL_NUMBER, Frames, Kind
from areal_like.capabilities.agents.workers.marks import Marks, shared_memory
from areal_like.capabilities.agents.workers.remote import Call, EndedWorker, Interrupted, Lane, Worker, WorkerLimits
from areal_like.capabilities.agents.workers.worker import END_S, FAILED, WorkerSettings
from areal_like.core.errors import RunError

LOST_S = 5.0  # for a worker with a closed connection to end
WARDEN_S = 10.0  # for the warden to kill everything
CLOSE_POLL_S = 0.02
MOST_STARTS = 3  # consecutive failures
MOST_FAILURES = 5  # calls in a row of one worker alone


class Workers:
    """The living workers; `changed` is set when the state of one changes. For use in one event loop only.

    `failure` is the reason why no further workers start.
    """

    def __init__(self, settings: WorkerSettings, limits: WorkerLimits, log: Path, say: Callable[[str], object]) -> None:
        self.limits, self.log, self.say = limits, log, say
        self.all: list[Worker] = []
        self.changed = asyncio.Event()
        self.failure: RunError | None = None
        self._loop = asyncio.get_running_loop()
        self._names = itertools.count()
        self._replaced: Counter[str] = Counter()
        self._failed_starts = 0
        self._closing = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._describe = os.memfd_create("areal-like-settings")
        os.write(self._describe, pickle.dumps(settings))
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._warden = subprocess.Popen(
                [*_program(warden.__name__), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._hear)

    async def close(self) -> None:
        """Stop or kill every worker, and kill its descendants."""
        self._closing = True
        for worker in self.all:
            for lane in worker.lanes:
                lane.frames.send(Kind.END, 0)
        limit = time.monotonic() + END_S + 1
        while any(worker.ready for worker in self.all) and time.monotonic() < limit:
            await asyncio.sleep(CLOSE_POLL_S)
        self._loop.remove_reader(self._control)
        self._control.close()  # the warden kills the remaining processes
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._warden.wait, WARDEN_S)
        self._warden.kill()
        for task in self._tasks:
            task.cancel()
        for worker in list(self.all):
            self.end(worker)
        os.close(self._describe)

    async def change(self) -> None:
        """Wait until the state of a worker changes."""
        self.changed.clear()
        await self.changed.wait()

    def raise_failure(self) -> None:
        """Raise the reason if workers are missing."""
        if self.failure is not None:
            raise self.failure

    def spawn(self, body: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine until it or the workers end."""
        task = self._loop.create_task(body)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def start(self, *, alone: bool = False) -> Worker:
        """Request a worker; it is ready once its loops report."""
        shared = shared_memory()
        worker = Worker(next(self._names), alone, Marks(shared))
        theirs = list[socket.socket]()
        for _ in range(1 if alone else self.limits.loops):
            lane = Lane()
            lane.frames, lane.blocking = [await self._connect(worker, lane, theirs) for _ in range(2)]
            worker.lanes.append(lane)
        self.all.append(worker)
        command = [*_program(worker_module.__name__), str(self._warden.pid)]
        request = {"start": worker.name, "command": command, "log": str(self.log)}
        descriptors = [self._describe, shared, *(end.fileno() for end in theirs)]
        try:
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
        except OSError:
            self.fail("the process that keeps the workers of the workflow has ended")
        finally:
            os.close(shared)
            for end in theirs:
                end.close()
        return worker

    async def _connect(self, worker: Worker, lane: Lane, theirs: list[socket.socket]) -> Frames:
        """Return a connection of a lane; add the worker's end to `theirs`."""
        ours, its = socket.socketpair()
        ours.setblocking(False)
        theirs.append(its)
        connection = Frames(
            lambda *frame: self._on_frame(worker, lane, connection, *frame), partial(self._lost, worker)
        )
        await self._loop.create_connection(lambda: connection, sock=ours)
        return connection

    def _hear(self) -> None:
        """Receive the warden's reports."""
        try:
            packet = self._control.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._loop.remove_reader(self._control)
            self.fail("the process that keeps the workers of the workflow has ended")
            return
        message = json.loads(packet)
        name = message.get("started", message.get("ended"))
        worker = next((each for each in self.all if each.name == name), None)
        if worker is None:
            return
        if "pid" in message:
            worker.pid = message["pid"]
            with suppress(ProcessLookupError):
                worker.handle = os.pidfd_open(message["pid"])
        else:
            self.note_end(worker, message["status"], message.get("why", ""))

    def note_end(self, worker: Worker, status: int | None, why: str) -> None:
        """Record that a worker has ended by itself."""
        if self._closing or worker.over:
            self.end(worker)
            return
        how = why or _describe(status)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= MOST_STARTS:
                self.fail(f"{MOST_STARTS} workers of the workflow in a row did not start ({how}); output: {self.log}")
            message, guilty, suspects = f"its process did not start ({how})", set[int](), set[int]()
        else:  # a worker with failed loops (FAILED) ends after the code that broke them
            message, marked = f"its process ended ({how})", set(worker.marks.running().values())
            suspects = worker.marks.ran_last() if status == FAILED else marked
            guilty = suspects if len(suspects) == 1 and status != FAILED else set()
        self.fault(worker, "died", message, guilty, suspects)

    def _lost(self, worker: Worker) -> None:
        """Record that a connection was closed; the process should end soon."""

        async def insist() -> None:
            await asyncio.sleep(LOST_S)
            if not worker.over:
                message = "its connection to the run was closed"
                self.fault(worker, "died", message, set(), worker.marks.ran_last())

        if not worker.over and not self._closing and worker.ready:
            self.spawn(insist())

    def fault(
        self, worker: Worker, cause: str, message: str, guilty: Collection[int], suspects: Collection[int]
    ) -> None:
        """Replace a worker, fail the responsible calls, and restart the others."""
        if worker.over:
            return
        calls = worker.calls
        guilty = set(calls) if worker.alone else set(guilty) & set(calls)
        again = len(calls) - len(guilty)
        self.end(worker)
        for number, call in calls.items():
            if call.result.done():
                continue
            if number in guilty:
                call.result.set_exception(EndedWorker(cause, message))
            else:
                call.result.set_exception(Interrupted(number in suspects and not guilty))
        self._replaced[cause] += bool(calls)
        if (
            calls and cause != "broken" and (times := self._replaced[cause]).bit_count() == 1
        ):  # the first, second, fourth, eighth, ... time
            more = f"; {again} other calls start again" if again else ""
            often = f" ({times} times so far)" if times > 1 else ""
            self.say(f"a worker of the workflow was replaced{often}: {message}{more}; its output: {self.log}")

    def end(self, worker: Worker) -> None:
        """Stop a worker, and start another one in its place."""
        if worker.over:
            return
        worker.over = True
        with suppress(ValueError):
            self.all.remove(worker)
        for lane in worker.lanes:
            lane.frames.close()
            lane.blocking.close()
        if worker.handle is not None:
            os.close(worker.handle)
            worker.handle = None
        with suppress(OSError):
            self._control.send(json.dumps({"kill": worker.name}).encode())
        if not (self._closing or worker.alone or worker.retires or self.failure):
            self.spawn(self.start())
        self.changed.set()

    def retire(self, worker: Worker) -> None:
        """Send no more calls to a worker in which the code of a cancelled call still runs."""
        if any(each.retires for each in self.all) or worker.alone:
            return  # one at a time
        worker.retires = True
        self.spawn(self.start())
        self.say(
            "the code of a cancelled episode still runs in its worker, for example in a thread, which cannot be stopped. "
            f"The worker is replaced when its other episodes have ended; its output: {self.log}"
        )
        if not worker.calls:
            self.end(worker)

    def note_outcome(self, worker: Worker, lane: Lane, *, failed: bool) -> None:
        """Note how a call ended; replace a worker whose last calls all failed, if other workers' calls did not."""
        worker.failures = worker.failures + 1 if failed else 0
        worker.done += not failed
        if failed:
            lane.failed.append(time.monotonic())
        if worker.failures < MOST_FAILURES or worker.over or worker.retires or worker.alone:
            return
        others = [each for each in self.all if each is not worker and each.done and not each.alone]
        # without other calls, the worker is compared with its own past
        if any(each.failures > 1 for each in others) if others else not worker.done:
            return
        compared = "those of the other workers" if others else "earlier ones"
        why = f"the last {worker.failures} episodes of one worker of the workflow all failed, {compared} did not"
        again = f"; {len(worker.calls)} other calls start again" if worker.calls else ""
        self.say(f"{why}. The worker is replaced{again}; its output: {self.log}")
        self.fault(worker, "broken", why, set(), set())

    def fail(self, message: str) -> None:
        """End all calls, because no workers will start."""
        self.failure = RunError(message)
        for worker in list(self.all):
            for call in worker.calls.values():
                if not call.result.done():
                    call.result.set_exception(self.failure)
        self.changed.set()

    def _on_frame(self, worker: Worker, lane: Lane, connection: Frames, kind: Kind, number: int, body: bytes) -> None:
        if kind == Kind.READY:
            lane.place = number
            if worker.ready:
                self._failed_starts = 0
                self.changed.set()
        elif kind == Kind.DONE:
            worker.left.pop(number, None)
            if (call := lane.calls.get(number)) is not None and not call.result.done():
                call.result.set_result(body)
        elif kind == Kind.ASK:
            (of_call,) = CALL_NUMBER.unpack_from(body)
            asking = lane.calls.get(of_call)
            answering = self.spawn(self._answer(connection, asking, number, body[CALL_NUMBER.size :]))
            if asking is not None:
                asking.answers[number] = answering
                answering.add_done_callback(partial(asking.answers.pop, number))
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
        except Exception as error:  # noqa: BLE001 - of any request of the user's code
            answer = f"-{error or type(error).__name__}".encode()
        connection.send(Kind.ANSWER, number, answer)


def _describe(status: int | None) -> str:
    """Describe how a process ended."""
    if status is None:
        return "it could not be started"
    return f"exit code {status}" if status >= 0 else signal.Signals(-status).name


def _program(module: str) -> list[str]:
    """Return the command that runs a module of this project, wherever that is imported from."""
    root = str(Path(__file__).parents[4])
    return [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {root!r}); import {module} as it; it.main()"]
