"""The forms that a user's function may have."""

import inspect
from typing import Any, Literal

from areal_like.capabilities.agents.parameters import parameters, takes

type Level = Literal["episode", "group"]

FORMS: dict[Level, tuple[str, ...]] = {"episode": ("row", "client"), "group": ("prompt", "n", "rollout")}


class WorkflowError(Exception):
    """An object is not a workflow; the message describes one."""


def level_of(function: Any) -> Level:
    """Return the form of a user's function by its number of parameters. Raises WorkflowError."""
    wanted = " or ".join(f"`async def run({', '.join(names)})`" for names in FORMS.values())
    if not callable(function):
        raise WorkflowError(f"it is {type(function).__name__}, not a function: write {wanted}")
    if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(type(function).__call__):
        raise WorkflowError(f"it is not asynchronous: write {wanted}")
    own = {each.name: each for each in parameters()}
    required = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.name not in own
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    for level, names in FORMS.items():
        if len(required) == len(names):
            refused = next((each for each in own.values() if level == "group" and takes(function, each.name)), None)
            if refused is not None:
                raise WorkflowError(f"a group has no parameter `{refused.name}`: {refused.for_group}")
            return level
    given = ", ".join(parameter.name for parameter in required) or "none"
    raise WorkflowError(f"it takes {len(required)} parameters ({given}): write {wanted}")
