"""Calls that wait for a file system, which may never answer."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


async def call_disk[T](function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a thread of its own; one that hangs keeps neither the caller nor this process from ending."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(settle_it: Callable[[Any], None], value: Any) -> None:
        def now() -> None:
            if not answer.done():
                settle_it(value)

        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(now)

    def call() -> None:
        try:
            settle(answer.set_result, function(*arguments))
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            settle(answer.set_exception, error)

    threading.Thread(target=call, name="disk", daemon=True).start()
    return await answer
