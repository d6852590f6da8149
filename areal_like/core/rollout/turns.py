"""Splits work into small pieces between turns of the event loop, so that thousands of them never block it for long."""

import asyncio
from collections import deque


class Turns:
    """`await turns()` before each piece: `pieces` of them begin in one turn of the event loop, in order.

    Up to twice as many begin in a turn when new ones arrive while others stop waiting.
    """

    def __init__(self, pieces: int) -> None:
        self._pieces = self._left = pieces
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_due = False

    async def __call__(self) -> None:
        """Return when the piece may begin."""
        loop = asyncio.get_running_loop()
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._renew)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _renew(self) -> None:
        self._left = self._pieces
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # its owner was cancelled
                turn.set_result(None)
                self._left -= 1
        self._is_due = self._left < self._pieces
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._renew)
