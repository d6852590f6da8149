"""Writes outside the event loop: in order, in one thread, which can end even if the file system hangs."""

import queue
import threading
from collections.abc import Callable

from areal_like.core.errors import RecordError

WAIT_S = 600.0  # a write that takes longer hangs


class Writer:
    """Executes calls in order; the first failure ends the run at the next call of `do` or `wait`."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._closed = False
        threading.Thread(target=self._work, name="record", daemon=True).start()

    def do(self, call: Callable[[], None]) -> None:
        """Queue a call. Raises the error of an earlier one."""
        self._raise()
        self._calls.put(call)

    def wait(self) -> None:
        """Wait until all queued calls have run; blocks, so call it in a thread. Raises RecordError."""
        done = threading.Event()
        self._calls.put(done.set)
        if not self._closed and not done.wait(WAIT_S):
            raise RecordError(f"the run's record was not written within {WAIT_S:g} s: its file system hangs")
        self._raise()

    def close(self) -> None:
        """Stop the thread after all queued calls, which `wait` waits for."""
        self._calls.put(None)
        self._closed = True

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                self._error = self._error or error
