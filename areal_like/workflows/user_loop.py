"""The thread that a user's coroutines run in, so that what blocks there never holds up the run."""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

BLOCKED_S = 10.0  # a loop that is busy for so long is blocked
BEAT_S = 1.0


async def in_loop[T](loop: asyncio.AbstractEventLoop, body: Coroutine[Any, Any, T]) -> T:
    """Have the loop of another thread run a coroutine; it is cancelled with this one."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(body, loop))


class TimeLimit(Exception):
    """A coroutine did not end within its limit."""


class CancelledWithin(Exception):
    """A coroutine was cancelled by what it ran itself, which nobody here has asked for."""


class UserLoop(AbstractAsyncContextManager["UserLoop"]):
    """An event loop in a thread of its own; `async with UserLoop(say) as users` stops it in the end.

    A coroutine that blocks (`time.sleep`, `requests.get`, long computations) holds up the others of its thread. Where
    that takes BLOCKED_S, `say` is told the line that blocks, and what starts afterwards gets a new thread. A thread
    cannot be killed: one that blocks for ever lasts as long as the process, as a daemon.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._loops: list[asyncio.AbstractEventLoop] = []  # the last one takes what comes
        self._watching: asyncio.Task[None] | None = None

    async def __aexit__(self, *_: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for loop in self._loops:
            loop.call_soon_threadsafe(loop.stop)
        self._loops.clear()

    async def run[T](self, body: Callable[[], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        """What `body()` returns; raises what that raises, CancelledWithin, and TimeLimit, also for a blocked thread."""
        if not self._loops:
            self._start()

        async def limited() -> T:
            try:
                async with asyncio.timeout(timeout_s) as limit:
                    return await body()
            except TimeoutError as error:
                if limit.expired():
                    raise TimeLimit from error
                raise

        future = asyncio.run_coroutine_threadsafe(limited(), self._loops[-1])
        done = asyncio.wrap_future(future)
        try:
            await asyncio.wait((done,), timeout=timeout_s + BLOCKED_S)
            if not done.done():
                raise TimeLimit
            if done.cancelled():  # to pass that on would look as if the run had cancelled the episode
                raise CancelledWithin
            return done.result()
        finally:
            done.cancel()

    def _start(self) -> None:
        loop = asyncio.new_event_loop()
        self._loops.append(loop)
        thread = threading.Thread(target=_serve, args=(loop,), name="workflows", daemon=True)
        thread.start()
        self._watching = asyncio.create_task(self._watch(loop, thread))

    async def _watch(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        """Ask the thread for a sign of life now and then; start another one where there is none."""
        while True:
            beat = threading.Event()
            asked = time.monotonic()
            loop.call_soon_threadsafe(beat.set)
            while not beat.is_set() and time.monotonic() - asked < BLOCKED_S:
                await asyncio.sleep(BEAT_S / 10 if time.monotonic() - asked < BEAT_S else BEAT_S)
            if not beat.is_set():
                self._say(
                    f"a workflow blocks its event loop for more than {BLOCKED_S:g} s {_where(thread)}: episodes that began "
                    "with it wait. Await something asynchronous there, or asyncio.to_thread(what blocks)"
                )
                return self._start()
            await asyncio.sleep(BEAT_S)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        while not _ran_to_its_stop(loop):
            pass
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()


def _ran_to_its_stop(loop: asyncio.AbstractEventLoop) -> bool:
    """Run until the loop is stopped, or until a task that a workflow has started exits as a program would."""
    try:
        loop.run_forever()
    except (SystemExit, KeyboardInterrupt):
        return False
    return True


def _where(thread: threading.Thread) -> str:
    """The innermost line of a thread that is not of Python's own or of installed packages."""
    frame = sys._current_frames().get(thread.ident or 0)
    lines = [line for line in traceback.extract_stack(frame) if not _is_library(line.filename)] if frame else []
    return f"({lines[-1].filename}:{lines[-1].lineno})" if lines else ""


def _is_library(filename: str) -> bool:
    return filename.startswith("<") or "/lib/python" in filename or __file__ == filename
