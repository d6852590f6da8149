"""The kinds of sandboxes: the shipped ones, and a user's class."""

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from areal_like.capabilities.sandbox.bubblewrap import Bubblewrap
from areal_like.capabilities.sandbox.containers import Containers
from areal_like.capabilities.sandbox.protocol import SandboxBackend, SandboxError
from areal_like.capabilities.sandbox.schema import CONTAINER_TOOLS, SandboxConfig
from areal_like.core.user_code import Portable, UserCodeError

SHIPPED: dict[str, Callable[[SandboxConfig], SandboxBackend]] = {
    "bubblewrap": Bubblewrap,
    **dict.fromkeys(CONTAINER_TOOLS, Containers),
}
PROBE_S = 120.0  # for the first sandbox of a kind, whose image may have to be unpacked
_WORD = b"sandbox"


@dataclass(frozen=True)
class Recipe:
    """The settings of a run's sandboxes, sent to worker processes; `own` is the user's class."""

    settings: SandboxConfig
    own: Portable | None

    @classmethod
    def pack(cls, settings: SandboxConfig) -> Self:
        """Pack the settings; raise UserCodeError if `backend` is neither shipped nor the name of a class."""
        if settings.backend in SHIPPED:
            return cls(settings, None)
        return cls(settings, Portable.pack(settings.backend))

    def backend(self) -> SandboxBackend:
        """Create the backend in the process that uses it. Raises UserCodeError."""
        if self.own is None:
            return SHIPPED[self.settings.backend](self.settings)
        try:
            made: SandboxBackend = self.own.load()(self.settings)
        except UserCodeError:
            raise
        except Exception as error:
            raise UserCodeError(f"{self.own.reference} fails: {type(error).__name__}: {error}") from error
        if not inspect.iscoroutinefunction(getattr(made, "start", None)):
            raise UserCodeError(f"{self.own.reference} has no `async def start(self)`")
        return made


async def probe(recipe: Recipe) -> None:
    """Start one sandbox, run a command in it and stop it. Raises SandboxError and UserCodeError."""
    try:
        async with asyncio.timeout(PROBE_S):
            box = await recipe.backend().start()
            try:
                outcome = await box.run(["/bin/sh", "-c", "cat"], _WORD, PROBE_S / 2, 1 << 10)
            finally:
                await box.close()
    except TimeoutError as error:
        raise SandboxError(f"it did not run a command within {PROBE_S:g} s") from error
    except (SandboxError, UserCodeError):
        raise
    except Exception as error:
        raise SandboxError(f"{type(error).__name__}: {error}") from error
    if outcome.status or outcome.stdout != _WORD:
        said = outcome.stderr.decode(errors="replace").strip()[:300]
        raise SandboxError(f"`cat` in a sandbox ended with status {outcome.status}: {said}")
