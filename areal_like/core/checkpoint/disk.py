"""Calls to a file system that may hang."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


async def call_disk[T](function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a thread of its own; a hung call blocks neither the caller's end nor this process's exit."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(settle_it: Callable[[Any], None], value: Any) -> None:
        def now() -> None:
            if not answer.done():
                settle_it(value)

        with suppress(RuntimeError):  # the loop is closed, so the caller has stopped waiting
            loop.call_soon_threadsafe(now)

    def call() -> None:
        try:
            settle(answer.set_result, function(*arguments))
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            settle(answer.set_exception, error)

    threading.Thread(target=call, name="disk", daemon=True).start()
    return await answer
