"""The parameter `sandbox` of workflows."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from areal_like.capabilities.agents.parameters import Parameter, Report
from areal_like.capabilities.sandbox.backends import Pools, Recipe
from areal_like.capabilities.sandbox.handle import Sandbox
from areal_like.capabilities.sandbox.protocol import SandboxError
from areal_like.capabilities.sandbox.schema import SandboxKeys
from areal_like.config.keys import with_keys
from areal_like.config.section import Section

NAME = "sandbox"


class Sandboxes:
    """The sandboxes of one worker process; see Provider."""

    def __init__(self) -> None:
        self._pools = Pools()

    @asynccontextmanager
    async def open(self, recipe: Recipe, report: Report) -> AsyncIterator[Sandbox]:
        """Yield a sandbox that ends with the block; report its usage."""
        sandbox = Sandbox(self._pools.find(recipe), recipe.settings)
        try:
            yield sandbox
        finally:
            await sandbox.close()
            await report(sandbox.usage)

    def for_group(self, recipe: Recipe, report: Report) -> Callable[[], AbstractAsyncContextManager[Sandbox]]:
        """Return the function `rollout.sandbox`."""
        return partial(self.open, recipe, report)


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
