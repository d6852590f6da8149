"""Tokens of an answer that is being generated, for connections that stream it."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress


class Progress:
    """The tokens so far, and the number of prompt tokens; created in the event loop that reads them."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.tokens: list[int] = []
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Future[None] = self._loop.create_future()

    @property
    def news(self) -> asyncio.Future[None]:
        """A future that is done when further tokens have arrived."""
        return self._news

    def add(self, tokens: Sequence[int]) -> None:
        """Add tokens; may be called from any thread, also after the last read."""
        with suppress(RuntimeError):  # the loop is closed: the endpoint has ended
            self._loop.call_soon_threadsafe(self._add, tokens)

    def _add(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        news, self._news = self._news, self._loop.create_future()
        if not news.done():
            news.set_result(None)
