"""The parameter `sandbox` of workflows."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from areal_like.capabilities.agents.parameters import Parameter, Report
from areal_like.capabilities.sandbox.backends import Recipe
from areal_like.capabilities.sandbox.handle import Sandbox
from areal_like.capabilities.sandbox.pool import Pool
from areal_like.capabilities.sandbox.protocol import SandboxError
from areal_like.capabilities.sandbox.schema import SandboxKeys
from areal_like.core.config.keys import with_keys
from areal_like.core.config.section import Section
from areal_like.core.user_code import UserCodeError

NAME = "sandbox"


class Sandboxes:
    """The sandboxes of one worker process, with a pool per event loop; see Provider."""

    def __init__(self) -> None:
        self._pools: dict[tuple[asyncio.AbstractEventLoop, str], Pool] = {}

    @asynccontextmanager
    async def open(self, recipe: Recipe, report: Report) -> AsyncIterator[Sandbox]:
        """Yield a sandbox that ends with the block; report its usage."""
        sandbox = Sandbox(self._pool(recipe), recipe.settings)
        try:
            yield sandbox
        finally:
            await sandbox.close()
            await report(sandbox.usage)

    def for_group(self, recipe: Recipe, report: Report) -> Callable[[], AbstractAsyncContextManager[Sandbox]]:
        """Return the function `rollout.sandbox`."""
        return partial(self.open, recipe, report)

    def _pool(self, recipe: Recipe) -> Pool:
        key = asyncio.get_running_loop(), recipe.settings.model_dump_json()
        if key not in self._pools:
            try:
                self._pools[key] = Pool(recipe.backend(), recipe.settings.warm)
            except UserCodeError as error:
                raise SandboxError(str(error)) from error
        return self._pools[key]


def _recipe(episode: Section) -> Recipe | None:
    settings = with_keys(episode, SandboxKeys).sandbox
    return Recipe.pack(settings) if settings else None


PARAMETER = Parameter(
    name=NAME,
    recipe=_recipe,
    provider=Sandboxes,
    missing="the run has no sandboxes: set episode.sandbox, such as episode.sandbox={}",
    for_group="write `async with rollout.sandbox() as sandbox`",
    error=SandboxError,
    cause="sandbox",
)
