"""Parameters of workflows beside the row and the client, such as `sandbox`: capabilities add them by `parameter.py`."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from areal_like.config.section import Section
from areal_like.registry import find_modules

type Report = Callable[[Mapping[str, float]], Awaitable[None]]
"""Add an episode's counts to the metrics `NAME/...` of the parameter; names that end in `_s` are means per start."""


class Provider(Protocol):
    """The part of a parameter in a worker process, made once per process; `recipe` is as Parameter makes it."""

    def open(self, recipe: Any, report: Report) -> AbstractAsyncContextManager[Any]:
        """Return the argument of one episode as a context."""
        ...

    def for_group(self, recipe: Any, report: Report) -> Any:
        """Return what a group has as `rollout.NAME`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of workflows by its name, PARAMETER of a capability's `parameter.py`.

    `recipe` makes of the section `episode` what is sent to worker processes, None if the run has none of it; `missing`
    says so. `for_group` says what a group uses. `error` fails an episode, which is counted under `cause`.
    """

    name: str
    recipe: Callable[[Section], Any]
    provider: Callable[[], Provider]
    missing: str
    for_group: str
    error: type[Exception]
    cause: str


@cache
def parameters() -> Sequence[Parameter]:
    """Return the parameters of all capabilities, in the order of these."""
    return [module.PARAMETER for _, module in find_modules("parameter")]


def pack_recipes(episode: Section) -> Mapping[str, Any]:
    """Return the recipes of a run by the names of parameters."""
    recipes = {each.name: each.recipe(episode) for each in parameters()}
    return {name: recipe for name, recipe in recipes.items() if recipe is not None}


def takes(function: Any, name: str) -> bool:
    """Return whether a workflow's function has a parameter of this name."""
    return name in inspect.signature(function).parameters
