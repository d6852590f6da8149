"""Tuning of Python's garbage collection and of glibc's heap, and the release of batches.

Without tuning, collection takes a fifth of the time to import torch and its dependents, and a scan of 10,000 requests
in flight blocks the event loop for 0.2 s.
"""

import asyncio
import ctypes
import gc
import os
import time
from collections.abc import AsyncIterator, Iterator, MutableSequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

YOUNG_S = 0.02  # between two collections of young objects
TOGETHER = 256  # trajectories released per iteration of the event loop, which takes about 2 ms
FULL_S = 60.0  # between two full collections; one takes 0.2 s with 10,000 requests in flight
# Collections that Python starts itself. It never starts a full one: explicit young ones reset its count of them.
RARELY = (20_000, 10, 1_000_000)
HEAP = {"MALLOC_ARENA_MAX": (-8, 1), "MALLOC_MMAP_THRESHOLD_": (-3, 128 << 10)}  # parameters of mallopt(3)


def bound_heap() -> None:
    """Limit the fragmentation of the heap in a process that runs for days, except where the environment sets this.

    By default glibc has an arena per thread, and comes to keep freed blocks of up to 32 MiB in them: a controller grew
    by 2 MiB in 1,000 steps. Trainers keep the default, with which they are faster.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc alone
    for name, (parameter, value) in HEAP.items():
        if mallopt is not None and name not in os.environ:
            mallopt(parameter, value)


@contextmanager
def pause_gc() -> Iterator[None]:
    """Disable collection while the body imports, and exclude the existing objects from later collections."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@asynccontextmanager
async def gc_tuned() -> AsyncIterator[None]:
    """Exclude existing objects from collection in the body; scan new ones once, in small pieces, and then rarely.

    The heap's fragmentation is limited from then on.
    """
    bound_heap()
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*RARELY)
    looking = asyncio.create_task(_collect())
    try:
        yield
    finally:
        looking.cancel()
        gc.set_threshold(*before)
        gc.unfreeze()


async def _collect() -> None:
    """Collect young objects at short intervals, and all objects at long ones.

    Otherwise Python starts only when many more objects were created than freed: if one batch is freed while the next
    one arrives, it scans 130,000 objects in one pass of 0.1 s.
    """
    last = time.monotonic()
    while True:
        await asyncio.sleep(YOUNG_S)
        is_due = time.monotonic() - last > FULL_S
        gc.collect(2 if is_due else 1)
        if is_due:
            last = time.monotonic()


async def release(batch: MutableSequence[Any]) -> None:
    """Empty a batch in pieces; freeing 512 x 16 x 16k tokens in a single pass takes 0.05 to 0.1 s."""
    while batch:
        del batch[-TOGETHER:]
        await asyncio.sleep(0)
