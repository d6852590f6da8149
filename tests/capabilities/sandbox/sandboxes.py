"""Which sandboxes this machine can make."""

from __future__ import annotations

import asyncio
import functools

from areal_like.capabilities.sandbox.backends import Recipe, probe
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
