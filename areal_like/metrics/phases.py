"""Where a step's time goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Seconds per named phase of the current step."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the body as part of phase `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def pop(self) -> dict[str, float]:
        """Seconds of each phase and of the whole `step` since the last call."""
        now = time.perf_counter()
        seconds = {**self._seconds, "step": now - self._since}
        self._seconds, self._since = {}, now
        return seconds
