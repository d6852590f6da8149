"""A thread that starts and stops Ray, so that a Ray that hangs blocks neither Ctrl-C nor the end of the run."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from areal_like.core.signals import last_signal

SETTLE_S = (
    5.0  # for a start that is interrupted to finish: Ray holds the GIL for a minute if its gcs is killed meanwhile
)


def _exit() -> None:
    """End this process at once: Python's own end would abort while a thread is in Ray's code."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(128 + last_signal[0] if last_signal else 1)


class RayThread:
    """The thread that calls `start` and later `stop`.

    Linux kills the processes of a private cluster with the thread that started them, so this thread lives until `stop`.
    """

    def __init__(self, start: Callable[[], None], stop: Callable[[], None], limit_s: float) -> None:
        self._start, self._stop, self._end_s = start, stop, time.monotonic() + limit_s
        self._settled, self._leave, self._stopped = threading.Event(), threading.Event(), threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="ray", daemon=True).start()

    def ready(self, wait_s: float = 0.0) -> bool:
        """Return whether Ray has started; raise its error, or TimeoutError after the limit."""
        if self._settled.wait(wait_s):
            if self._error is not None:
                raise self._error
            return True
        if self._is_late:
            raise TimeoutError
        return False

    @property
    def _is_late(self) -> bool:
        return time.monotonic() > self._end_s

    def end(self, limit_s: float) -> None:
        """Stop Ray; leave a start or stop that takes longer to the janitor, and its thread behind."""
        self._leave.set()
        if not self._settled.wait(0.0 if self._is_late else SETTLE_S) or not self._stopped.wait(limit_s):
            import ray

            logging.getLogger("ray").setLevel(logging.CRITICAL)  # it reports that its processes were ended
            atexit.unregister(ray.shutdown)  # it would wait for the thread that hangs
            atexit.register(_exit)

    def _run(self) -> None:
        try:
            self._start()
        except BaseException as error:  # noqa: BLE001 - `ready` raises it
            self._error = error
        self._settled.set()
        if self._error is None:
            self._leave.wait()
            with suppress(Exception):  # the processes may be gone
                self._stop()
        self._stopped.set()
