"""Sandboxes that are started before an episode needs them; each serves only one episode."""

import asyncio
import contextvars
import time
from collections import deque

from areal_like.capabilities.sandbox.protocol import Box, SandboxBackend, SandboxError

MOST_AT_ONCE = 4  # concurrent starts of sandboxes


type StartedSandbox = tuple[Box, float]
"""A sandbox, and the seconds of its start."""


class Pool:
    """The sandboxes of one event loop; after the first use, `warm` of them are started in advance."""

    def __init__(self, backend: SandboxBackend, warm: int) -> None:
        self._backend, self._warm = backend, warm
        self._ready: deque[asyncio.Task[StartedSandbox]] = deque()
        self._starts = asyncio.Semaphore(MOST_AT_ONCE)

    async def take(self) -> StartedSandbox:
        """Return a fresh sandbox, which the caller closes; it is replaced in the background. Raises SandboxError."""
        chosen = self._ready.popleft() if self._ready else self._begin()
        while len(self._ready) < self._warm:
            self._ready.append(self._begin())
        try:
            return await asyncio.shield(chosen)
        except asyncio.CancelledError:
            self._ready.appendleft(chosen)
            raise
        except SandboxError:  # perhaps of an old start; only the new start counts
            return await self._begin()

    def _begin(self) -> asyncio.Task[StartedSandbox]:
        """Start a sandbox in a context of its own, because it does not belong to an episode yet."""
        return asyncio.get_running_loop().create_task(self._start(), context=contextvars.Context())

    async def _start(self) -> StartedSandbox:
        async with self._starts:
            began = time.monotonic()
            try:
                box = await self._backend.start()
            except (OSError, ValueError) as error:
                raise SandboxError(f"{type(error).__name__}: {error}") from error
            return box, time.monotonic() - began
