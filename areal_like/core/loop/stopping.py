"""The first Ctrl-C: the run saves a checkpoint of its last step, then ends."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from areal_like.core.checkpoint.recovery import Recovery
from areal_like.core.signals import on_first_interrupt


class Stop:
    """A request to end after the next checkpoint; without `recovery` no request is accepted."""

    def __init__(self, recovery: Recovery | None, say: Callable[[str], None]) -> None:
        self.recovery, self._say = recovery, say
        self.asked = asyncio.Event()

    @contextmanager
    def accept(self) -> Iterator[None]:
        """Handle Ctrl-C in the block: the first one requests a checkpoint, the second one ends the run at once."""
        if self.recovery is None:
            yield
            return
        with on_first_interrupt(self._ask):
            yield

    async def leave(self) -> None:
        """End the run as Ctrl-C does, when the checkpoint is complete."""
        if self.recovery is not None:
            await self.recovery.wait_for_write()
        signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()  # until the run's task is cancelled

    def _ask(self) -> None:
        self._say("Ctrl-C: the run saves a checkpoint of its last step, then ends. Press Ctrl-C again to end at once.")
        self.asked.set()


async def unless_stopped[T](stop: Stop, waiting: asyncio.Task[T]) -> T | None:
    """Return the task's result, or None if the run is asked to stop before; the task is cancelled then."""
    asked = asyncio.create_task(stop.asked.wait())
    try:
        await asyncio.wait([asked, waiting], return_when=asyncio.FIRST_COMPLETED)
        return waiting.result() if waiting.done() else None
    finally:
        unfinished = [task for task in (asked, waiting) if not task.done()]
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
