"""A cache of scores by text: equal texts are scored once, also while the first request is pending."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from hashlib import sha256

from areal_like.rewards.pool import Failure


class ScoreCache:
    """The last `size` scores, without failures. Texts are stored as digests, because they may be long."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._scores: OrderedDict[bytes, float] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[float | Failure]] = {}

    async def get(self, text: str, score: Callable[[str], Awaitable[float | Failure]]) -> tuple[float | Failure, bool]:
        """Return the score of a text, and whether it came from another request."""
        if not self._size:
            return await score(text), False
        key = sha256(text.encode("utf-8", "surrogatepass")).digest()
        if (known := self._scores.get(key)) is not None:
            self._scores.move_to_end(key)
            return known, True
        was_running = key in self._running
        if not was_running:
            self._running[key] = asyncio.create_task(self._run(key, text, score))
        # A caller that is cancelled leaves the request to the others that wait for it.
        return await asyncio.shield(self._running[key]), was_running

    async def close(self) -> None:
        """Cancel the pending requests."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _run(self, key: bytes, text: str, score: Callable[[str], Awaitable[float | Failure]]) -> float | Failure:
        try:
            outcome = await score(text)
        finally:
            del self._running[key]
        if not isinstance(outcome, Failure):
            self._scores[key] = outcome
            if len(self._scores) > self._size:
                self._scores.popitem(last=False)
        return outcome
