"""Ctrl-C and SIGTERM end a run like an error: everything that it started is stopped first."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

last_signal: list[int] = []  # that ended a run of this process
_first: list[Callable[[], None]] = []  # the last one receives the first Ctrl-C


def renew_handlers() -> None:
    """Install this process's handlers again; Ray replaces the SIGTERM handler below Python when it connects."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.getsignal(number))


@contextmanager
def on_first_interrupt(call: Callable[[], None]) -> Iterator[None]:
    """Call `call` in the event loop at the first Ctrl-C in the block, which then does not cancel the run."""
    _first.append(call)
    try:
        yield
    finally:
        _first.remove(call)


@contextmanager
def signals_cancel() -> Iterator[None]:
    """Cancel the block on Ctrl-C and SIGTERM; the block then raises their exception, even if others occur meanwhile.

    The signals often reach the whole process group, and with it the private cluster, so failures are expected. Only the
    main thread receives signals: the caller must cancel a run in another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    task, loop, came = asyncio.current_task(), asyncio.get_running_loop(), list[int]()
    asked = list[int]()

    def cancel(number: int, _: object) -> None:
        if number == signal.SIGINT and _first and not asked and not came:
            asked.append(number)
            loop.call_soon_threadsafe(_first[-1])
            return
        if not came and task is not None:
            loop.call_soon_threadsafe(task.cancel)
        came.append(number)
        last_signal[:] = [came[0]]
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)  # a second signal ends the wait

    # not the loop's handlers, which need the descriptor that reports signals to the watchdog
    signal.signal(signal.SIGINT, cancel)
    signal.signal(signal.SIGTERM, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if came:
            raise KeyboardInterrupt if came[0] == signal.SIGINT else SystemExit(128 + signal.SIGTERM) from None
