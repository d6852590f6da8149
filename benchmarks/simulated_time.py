"""An event loop whose clock jumps to the next timer when nothing is ready, so hours of waiting take no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock


class _Selector(selectors.DefaultSelector):
    """A selector that, instead of waiting, moves its clock `now` on by the time that it should wait."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("every task waits for something that never comes")
        self.now += 0.0 if ready or timeout is None else max(0.0, timeout)
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop on a simulated clock in seconds, for code without sockets and threads."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def advance(self, seconds: float) -> None:
        """Let time pass in which the event loop is blocked."""
        self._clock.now += seconds


async def call_here(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function in the event loop's thread, in place of `asyncio.to_thread`."""
    return function(*arguments, **options)


def simulate[T](main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a simulated clock, which `time.monotonic` shows too; threads run in the event loop."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        loop = runner.get_loop()
        with mock.patch("time.monotonic", loop.time), mock.patch.object(asyncio, "to_thread", call_here):
            return runner.run(main)
