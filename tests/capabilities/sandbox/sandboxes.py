"""Sandboxes of tests, and which of them this machine can make."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from areal_like.capabilities.sandbox.backends import Recipe, probe
from areal_like.capabilities.sandbox.handle import Sandbox
from areal_like.capabilities.sandbox.pool import Pool
from areal_like.capabilities.sandbox.protocol import SandboxError
from areal_like.capabilities.sandbox.schema import SandboxConfig


@functools.cache
def why_not(backend: str = "bubblewrap", image: str | None = None) -> str:
    """Return why this machine has no sandboxes of a kind; empty where it has."""
    try:
        asyncio.run(probe(Recipe.pack(SandboxConfig(backend=backend, image=image))))
    except SandboxError as error:
        return f"no sandbox of {backend} starts here: {error}"
    return ""


@asynccontextmanager
async def opened(settings: SandboxConfig, pool: Pool | None = None) -> AsyncIterator[Sandbox]:
    """A sandbox of a pool, by default one that keeps no warm sandboxes."""
    sandbox = Sandbox(pool or Pool(Recipe.pack(settings).backend(), 0), settings)
    try:
        yield sandbox
    finally:
        await sandbox.close()
