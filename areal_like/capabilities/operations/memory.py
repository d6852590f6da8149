"""Memory of processes over time: one metric for each, and a warning where one grows steadily."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from statistics import mean

from areal_like.capabilities.operations.alerts import Alert
from areal_like.capabilities.operations.processes import ProcessSize

MIB, GIB = 1 << 20, 1 << 30
LOOK_S = 10.0  # between two looks at processes
MINUTE_S, MINUTES = 60.0, 30  # between two values of a series, and values of it
PARTS = 6  # of a series, whose means have to rise one after the other
LEAST_GROWTH, LEAST_BYTES = 0.05, 64 * MIB  # over the series: share of the memory, and bytes
EVEN = 0.5  # least growth from part to part, as a share of the mean one: a cache that fills grows ever less
MOST_NAMES = 64  # of metrics; of more processes, the largest

type ReadNodes = Callable[[], Awaitable[Sequence[Iterable[ProcessSize]]]]


async def _read_none() -> Sequence[Iterable[ProcessSize]]:
    return ()


@dataclass(eq=False)
class ProcessMemory:
    """The memory of this run's processes, read at most every LOOK_S seconds; `read_nodes` reads those of other hosts.

    Processes with one name, such as the processes of a server, are added up.
    """

    read: Callable[[], Iterable[ProcessSize]]
    clock: Callable[[], float] = time.monotonic
    read_nodes: ReadNodes = _read_none
    _metrics: dict[str, float] = field(default_factory=dict, init=False)
    _series: dict[str, deque[int]] = field(default_factory=dict, init=False)
    _looked: float | None = field(default=None, init=False)
    _noted: float | None = field(default=None, init=False)

    async def look(self) -> None:
        """Read the memory of all processes, unless that was done recently."""
        if self._looked is not None and self.clock() - self._looked < LOOK_S:
            return
        self._looked = self.clock()
        whole, private = dict[str, int](), dict[str, int]()
        for each in (*await asyncio.to_thread(self.read), *chain.from_iterable(await self.read_nodes())):
            whole[each.name] = whole.get(each.name, 0) + each.resident
            private[each.name] = private.get(each.name, 0) + each.private
        largest = sorted(whole, key=lambda name: -whole[name])[:MOST_NAMES]
        self._metrics = {f"memory/{name}": round(whole[name] / GIB, 4) for name in sorted(largest)}
        if self._noted is None or self.clock() - self._noted >= MINUTE_S:
            self._noted = self.clock()
            self._note(private)

    def _note(self, private: Mapping[str, int]) -> None:
        self._series = {name: self._series.get(name, deque(maxlen=MINUTES)) for name in private}
        for name, size in private.items():
            self._series[name].append(size)

    def metrics(self) -> dict[str, float]:
        """Return the resident GiB by process."""
        return dict(self._metrics)

    def growing(self) -> Alert | None:
        """Return the alert about the fastest of the steadily growing processes, if any."""
        found = {name: per for name, series in self._series.items() if (per := growth(series)) is not None}
        if not found:
            return None
        name, per = max(found.items(), key=lambda item: item[1])
        size, hourly = self._series[name][-1] / GIB, per * 3600 / MINUTE_S / GIB
        cause = f"it grew by {hourly:.2g} GiB an hour for {MINUTES} minutes, to {size:.2g} GiB"
        fix = "Restart the run before the host has no memory left (recover.mode=auto), and see which of its code keeps data"
        return Alert("memory-growth", f"the memory of {name} grows steadily: {cause}. {fix}")


def growth(series: "deque[int]") -> float | None:
    """Return the growth of a full series from value to value, None unless it is steady.

    The series is cut into parts. Every mean must exceed the one before by a similar amount, which neither noise, a step
    nor a cache that fills does.
    """
    if len(series) < MINUTES:
        return None
    values, size = list(series), MINUTES // PARTS
    means = [mean(values[start : start + size]) for start in range(0, MINUTES, size)]
    rises = [after - before for before, after in pairwise(means)]
    total = means[-1] - means[0]
    if total < max(LEAST_BYTES, LEAST_GROWTH * means[0]) or min(rises) < EVEN * mean(rises):
        return None
    return total / (MINUTES - size)
