"""Selects the steps in which the drift alarm probes, so that probes take a small share of a run's time."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST = 3  # steps with a probe in any case: faults of settings and of the first weight updates show in them
SHARE = 0.03  # most of the run's time that probes take after the first ones


class Schedule:
    """Measures the cost of probes and returns when the next one is due."""

    def __init__(self, share: float = SHARE, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._clock = share, clock
        self._probes = 0
        self._cost = 0.0  # seconds of the last probe
        self._ended = 0.0

    def is_due(self) -> bool:
        """Return whether this step has a probe: the time since the last one outweighs its cost."""
        waited = self._clock() - self._ended
        if self._probes >= FIRST and self._share * waited < (1 - self._share) * self._cost:
            return False
        self._probes += 1
        self._cost = 0.0
        return True

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Add the time of the body to the cost of this step's probe."""
        start = self._clock()
        try:
            yield
        finally:
            self._ended = self._clock()
            self._cost += self._ended - start
