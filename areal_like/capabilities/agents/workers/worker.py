"""A process that runs user code. Its arguments are descriptors: settings, marks, and two sockets for each loop.

It has several event loops, each in its own thread with a connection to the main process. A call runs on one of them.
Every step of a call's code is marked in memory that the main process reads (`marks.py`), which identifies a call that
blocks its loop, holds the GIL or ends the process.
"""

import asyncio
import contextvars
import faulthandler
import gc
import importlib
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from areal_like.capabilities.agents.workers.frames import CALL_NUMBER, Frames, Kind, Unanswered, frame
from areal_like.capabilities.agents.workers.marks import Mark, Marks
from areal_like.core.gc_tuning import bound_heap
from areal_like.runtime.descendants import adopt_orphans, die_with_parent

BEAT_S = 0.1
PULSE = 0  # place of the mark of the main thread
END_S = 2.0  # for cancelled code at the end
DUMP = signal.SIGUSR2  # makes faulthandler write the stacks of all threads to standard error
FAILED = 70  # exit code of a worker whose loop failed, for example by a closed descriptor
MB = 1 << 20
# Made before a call's code can damage `pickle`.
DAMAGED = pickle.dumps((False, "raised", "its worker is damaged, for example by another call that replaced a function"))
UNUSED_MB = 1024  # for stacks of threads and reservations of libraries, which count but take no memory

_call: contextvars.ContextVar[int] = contextvars.ContextVar("call", default=0)
_is_fork = False  # this process was forked by a call


@dataclass(frozen=True)
class WorkerSettings:
    """A worker's settings from the main process: its search path, the code that runs calls, and its memory in MB.

    `entry` is `module:name` of a function from `start` to a Handler.
    """

    path: Sequence[str]
    entry: str
    start: bytes
    memory_mb: int | None = None


type Ask = Callable[[str, bytes], Awaitable[bytes]]
"""Ask the main process something for a call: method and body. Raises Unanswered."""

type AskNow = Callable[[str, bytes], bytes]
"""As Ask, and wait for the answer in this thread."""

type Handler = Callable[[bytes, Ask, AskNow], Coroutine[Any, Any, bytes]]
"""Run a call; raises nothing but CancelledError. The first item of the pickled result is whether the call succeeded."""


def main() -> None:
    """Serve calls until the main process closes the connections."""
    parent, *descriptors = sys.argv[1:]
    die_with_parent(int(parent))
    adopt_orphans()
    faulthandler.enable()
    faulthandler.register(DUMP, file=sys.stderr, all_threads=True)
    described, shared, *connections = map(int, descriptors)
    settings: WorkerSettings = pickle.loads(os.pread(described, os.fstat(described).st_size, 0))  # noqa: S301  # of its parent
    sys.path[:] = settings.path
    marks = Marks(shared)
    for descriptor in (described, shared):
        os.close(descriptor)
    os.register_at_fork(after_in_child=partial(_in_fork, marks, connections))
    module, _, name = settings.entry.partition(":")
    handler: Handler = getattr(importlib.import_module(module), name)(settings.start)
    gc.collect()
    gc.freeze()
    bound_heap()
    if settings.memory_mb is not None:
        limit_allocations(settings.memory_mb)
    mark = marks.take()  # of the only idle thread: if it does not beat, another thread holds the GIL
    threads = [
        threading.Thread(target=_Loop(marks, handler, *pair).serve, name=f"loop {place}", daemon=True)
        for place, pair in enumerate(zip(connections[::2], connections[1::2], strict=True))
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        mark.beat()
        time.sleep(BEAT_S)
    sys.stdout.flush()
    os._exit(0)  # threads of calls may never end


def limit_allocations(memory_mb: int) -> None:
    """Let allocations above a limit fail in this process and its children, before they take the host's memory.

    The main process measures memory at intervals (`watch.py`), during which one allocation could take everything.
    """
    limit, (_, most) = (memory_mb + UNUSED_MB) * MB, resource.getrlimit(resource.RLIMIT_DATA)
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def has_memory_limit() -> bool:
    """Tell whether allocations of this process are limited."""
    return resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY


def _in_fork(marks: Marks, connections: Sequence[int]) -> None:
    """Close the connection and the marks in a forked child."""
    global _is_fork
    _is_fork = True
    marks.detach()
    for descriptor in connections:
        with suppress(OSError):  # closed by the call's code
            os.close(descriptor)


class _Marked(Coroutine[Any, Any, Any]):
    """A coroutine that sets its call in the thread's mark during each step."""

    __slots__ = ("_body", "_call", "_mark")

    def __init__(self, body: Coroutine[Any, Any, Any], mark: Mark, call: int) -> None:
        self._body, self._mark, self._call = body, mark, call

    def send(self, value: Any) -> Any:
        return self._step(self._body.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._body.throw, *error)

    def close(self) -> None:
        self._body.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._body.__await__()

    def __getattr__(self, name: str) -> Any:  # such as cr_frame, which stack traces need
        return getattr(self._body, name)

    def _step(self, step: Callable[..., Any], *arguments: Any) -> Any:
        self._mark.set(self._call)
        try:
            return step(*arguments)
        finally:
            if _is_fork:  # the call's code forked, and this is the child
                os._exit(0)
            self._mark.set(0)


class _CallTask(asyncio.Task[Any]):
    """A task that the code of other calls cannot cancel, for example with all tasks of the loop."""

    def cancel(self, msg: Any | None = None) -> bool:
        """See Task; returns False for a task of another call."""
        canceller, own = _call.get(), self.get_context().get(_call, 0)
        return False if canceller and canceller != own else super().cancel(msg)


class _Threads(ThreadPoolExecutor):
    """The executor of `asyncio.to_thread`: marks its threads with the call that submitted the work."""

    def __init__(self, marks: Marks) -> None:
        super().__init__(32, "to_thread")
        self._marks, self._own = marks, threading.local()

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        return super().submit(self._run, _call.get(), partial(function, *arguments, **named))

    def _run(self, call: int, work: Callable[[], Any]) -> Any:
        if not hasattr(self._own, "mark"):
            self._own.mark = self._marks.take()
        self._own.mark.set(call)
        try:
            return work()
        finally:
            if _is_fork:
                os._exit(0)
            self._own.mark.set(0)


class _Loop:
    """One event loop, its thread and its two connections: one for the loop, one for questions that block."""

    def __init__(self, marks: Marks, handler: Handler, descriptor: int, blocking: int) -> None:
        self._marks, self._handler = marks, handler
        self._socket, self._blocking = socket.socket(fileno=descriptor), socket.socket(fileno=blocking)
        self._one_at_a_time = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._frames = Frames(self._on_frame, self._loop.stop)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._asked = 0
        self._ends = False

    def serve(self) -> None:
        """Run the loop until its connection is closed."""
        asyncio.set_event_loop(self._loop)
        self._mark = self._marks.take()
        self._loop.set_default_executor(_Threads(self._marks))
        self._loop.set_task_factory(self._task)
        try:
            self._loop.run_until_complete(self._loop.create_connection(lambda: self._frames, sock=self._socket))
            self._beat()
            self._frames.send(Kind.READY, self._mark.place)
            while not self._ran_to_its_stop():
                pass
        except BaseException:  # noqa: BLE001 - such as epoll's, whose descriptor a call has closed
            sys.excepthook(*sys.exc_info())
            os._exit(FAILED)

    def _ran_to_its_stop(self) -> bool:
        """Run until the loop is stopped, or until a call's task exits like a program."""
        try:
            self._loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            return False
        return True

    def _beat(self) -> None:
        self._mark.beat()
        self._loop.call_later(BEAT_S, self._beat)

    def _task(
        self, loop: asyncio.AbstractEventLoop, body: Any, *, context: contextvars.Context | None = None, **more: Any
    ) -> asyncio.Task[Any]:
        call = context.get(_call, 0) if context is not None else _call.get()
        marked = _Marked(body, self._mark, call) if call and asyncio.iscoroutine(body) else body
        return _CallTask(marked, loop=loop, context=context, **more)

    def _on_frame(self, kind: Kind, number: int, body: bytes) -> None:
        if kind == Kind.CALL:
            context = contextvars.copy_context()
            context.run(_call.set, number)
            self._tasks[number] = self._loop.create_task(self._serve(number, body), context=context)
        elif kind == Kind.ANSWER and (answer := self._answers.pop(number, None)) is not None:
            if not answer.done():
                answer.set_result(body)
        elif kind == Kind.CANCEL and number in self._tasks:
            self._tasks[number].cancel()
        elif kind == Kind.END and not self._ends:
            self._ends = True
            for task in (tasks := asyncio.all_tasks(self._loop)):
                task.cancel()
            waiting = asyncio.wait(tasks, timeout=END_S) if tasks else asyncio.sleep(0)
            self._loop.create_task(waiting).add_done_callback(lambda _: self._loop.stop())

    async def _serve(self, number: int, body: bytes) -> None:
        result = b""  # of a cancelled call
        try:
            result = await self._handler(body, partial(self._ask, number), partial(self._ask_now, number))
        except Exception:  # noqa: BLE001 - a call's code has damaged modules of the handler, such as `pickle`
            result = DAMAGED
        finally:
            del self._tasks[number]
            self._frames.send(Kind.DONE, number, result)

    async def _ask(self, call: int, method: str, body: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # a loop of user code in its own thread
            asked = asyncio.run_coroutine_threadsafe(self._ask(call, method, body), self._loop)
            return await asyncio.wrap_future(asked)
        self._asked += 1
        answer = self._answers[self._asked] = self._loop.create_future()
        number = self._asked
        self._frames.send(Kind.ASK, number, _question(call, method, body))
        try:
            return _check(await answer)
        finally:
            if self._answers.pop(number, None) is not None:
                self._frames.send(Kind.DROP, number)

    def _ask_now(self, call: int, method: str, body: bytes) -> bytes:
        with self._one_at_a_time:
            self._blocking.sendall(frame(Kind.ASK, 0, _question(call, method, body)))
            return _check(_receive(self._blocking))


def _question(call: int, method: str, body: bytes) -> bytes:
    return CALL_NUMBER.pack(call) + method.encode() + b"\n" + body


def _check(answer: bytes) -> bytes:
    """Return the content of an answer; raise Unanswered if it contains the reason why there is none."""
    if answer[:1] != b"+":
        raise Unanswered(answer[1:].decode(errors="replace"))
    return answer[1:]


def _receive(connection: socket.socket) -> bytes:
    """Receive the body of the next message."""
    found: list[bytes] = []
    frames = Frames(lambda kind, number, body: found.append(body), lambda: None)
    while not found:
        data = connection.recv(1 << 20)
        if not data:
            raise ConnectionResetError("the main process is gone")
        frames.data_received(data)
    return found[0]
