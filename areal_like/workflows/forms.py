"""The forms that a user's function may have."""

import inspect
from typing import Any, Literal

from areal_like.workflows.mcp_servers import PARAMETER as TOOLS
from areal_like.workflows.mcp_servers import takes_tools
from areal_like.workflows.sandbox.handle import PARAMETER as SANDBOX
from areal_like.workflows.sandbox.handle import takes_sandbox

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
    parameters = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.name not in (SANDBOX, TOOLS)
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    for level, names in FORMS.items():
        if len(parameters) == len(names):
            if level == "group" and takes_sandbox(function):
                raise WorkflowError(
                    "a group has no parameter `sandbox`: write `async with rollout.sandbox() as sandbox`"
                )
            if level == "group" and takes_tools(function):
                raise WorkflowError("a group has no parameter `tools`: use `rollout.tools`")
            return level
    given = ", ".join(parameter.name for parameter in parameters) or "none"
    raise WorkflowError(f"it takes {len(parameters)} parameters ({given}): write {wanted}")
