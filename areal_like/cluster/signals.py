"""Ctrl-C and SIGTERM end a run as an error does: everything that it has started is stopped first."""

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def signals_cancel() -> Iterator[None]:
    """Cancel the block at Ctrl-C and SIGTERM; it then ends by them, whatever else fails meanwhile.

    They often reach the whole process group, and with it the private cluster, so failures are to be expected. Signals
    reach the main thread alone: a run in another one is cancelled by who started it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    task, loop, came = asyncio.current_task(), asyncio.get_running_loop(), list[int]()

    def cancel(number: int, _: object) -> None:
        if not came and task is not None:
            loop.call_soon_threadsafe(task.cancel)
        came.append(number)
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)  # a second signal asks not to wait

    # not the loop's handlers: they need the descriptor by which the watchdog hears of signals
    signal.signal(signal.SIGINT, cancel)
    signal.signal(signal.SIGTERM, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if came:
            raise KeyboardInterrupt if came[0] == signal.SIGINT else SystemExit(128 + signal.SIGTERM) from None
