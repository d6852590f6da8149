"""When Python collects garbage: it takes a fifth of the time in which torch and what builds on it are imported, and
stops the event loop for 0.2 s where it looks through 10,000 requests in flight. And how a batch goes.
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator, MutableSequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

YOUNG_S = 0.02  # between two looks through what has come since the last one
TOGETHER = 256  # trajectories that go in one turn of the event loop, some 2 ms
# The last number: a look through everything after so many looks at what came, some ten minutes.
RARELY = (20_000, 10, 30_000)


@contextmanager
def pause_gc() -> Iterator[None]:
    """Collect nothing while the body imports, and never look through what there is then."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@asynccontextmanager
async def gc_tuned() -> AsyncIterator[None]:
    """Have what is there now never looked through while the body runs, and what comes once, in small pieces, and
    rarely again.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*RARELY)
    looking = asyncio.create_task(_look_through_the_young())
    try:
        yield
    finally:
        looking.cancel()
        gc.set_threshold(*before)
        gc.unfreeze()


async def _look_through_the_young() -> None:
    """Collect young objects at intervals.

    Otherwise Python begins only once many more objects were made than freed: with 130,000 of them at once, for 0.1 s,
    where one batch is freed while the next one arrives.
    """
    while True:
        await asyncio.sleep(YOUNG_S)
        gc.collect(1)


async def release(batch: MutableSequence[Any]) -> None:
    """Empty a batch that nobody else holds: at once the memory of 512 x 16 x 16k tokens goes in 0.05 to 0.1 s."""
    while batch:
        del batch[-TOGETHER:]
        await asyncio.sleep(0)
