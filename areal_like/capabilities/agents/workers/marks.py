"""Memory shared by a worker and the main process: which thread runs which call, and which event loop still iterates.

Reading it does not need the worker's GIL, so it shows the state of a blocked or dead worker.
"""

import mmap
import os
import threading

THREADS = 256  # marked threads per worker
_FIELDS = 5  # beat, call, last call, thread id of the kernel, thread id of Python
_SIZE = THREADS * _FIELDS * 8


def shared_memory() -> int:
    """Return a descriptor of memory for the marks of one worker."""
    descriptor = os.memfd_create("areal-like-marks")
    os.ftruncate(descriptor, _SIZE)
    return descriptor


class Marks:
    """The marks of one worker, on either side."""

    def __init__(self, descriptor: int) -> None:
        self._fields = memoryview(mmap.mmap(descriptor, _SIZE)).cast("q")
        self._next = 0

    def detach(self) -> None:
        """Use private memory from now on, for a forked child."""
        self._fields = memoryview(bytearray(_SIZE)).cast("q")

    def take(self) -> "Mark":
        """Return a mark for the calling thread."""
        place, self._next = self._next % THREADS, self._next + 1
        base = place * _FIELDS
        self._fields[base + 3], self._fields[base + 4] = threading.get_native_id(), threading.get_ident()
        return Mark(self, place)

    def beat(self, place: int) -> int:
        """Return the number of iterations of a thread's loop."""
        return self._fields[place * _FIELDS]

    def call(self, place: int) -> int:
        """Return the call that a thread runs now, or 0."""
        return self._fields[place * _FIELDS + 1]

    def thread(self, place: int) -> tuple[int, int]:
        """Return a thread's ids: the kernel's, and Python's."""
        base = place * _FIELDS
        return self._fields[base + 3], self._fields[base + 4]

    def running(self) -> dict[int, int]:
        """Return the calls that threads run now, by the thread's place."""
        return {place: call for place in range(THREADS) if (call := self.call(place))}

    def ran_last(self) -> set[int]:
        """Return the call that each thread runs, or ran last."""
        return {call for place in range(THREADS) if (call := self._fields[place * _FIELDS + 2])}


class Mark:
    """The mark of one thread."""

    def __init__(self, marks: Marks, place: int) -> None:
        self._marks, self._base = marks, place * _FIELDS
        self.place = place

    def beat(self) -> None:
        """Record an iteration of the thread's loop."""
        self._marks._fields[self._base] += 1

    def set(self, call: int) -> None:
        """Record the call that the thread runs now; 0 for none."""
        fields = self._marks._fields
        fields[self._base + 1] = call
        if call:
            fields[self._base + 2] = call
