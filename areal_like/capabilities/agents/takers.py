"""Finds workflows with a parameter that the engine provides by name, such as `sandbox`."""

import inspect
from collections.abc import Iterator

from areal_like.capabilities.agents.forms import WorkflowError, level_of
from areal_like.config.schema import RunConfig
from areal_like.runtime.user_code import UserCodeError, load_object


def find_takers(config: RunConfig, parameter: str) -> Iterator[tuple[str, bool]]:
    """Yield the keys of workflows that may use a parameter, as every group may, and whether they can do without."""
    for key, reference in config.workflows.items():
        try:
            function = load_object(reference)
            parameters = inspect.signature(function).parameters
        except (UserCodeError, TypeError, ValueError):  # a finding about the workflow reports it
            yield key, True
            continue
        if parameter in parameters:
            yield key, parameters[parameter].default is not inspect.Parameter.empty
        elif _may_be_group(function):
            yield key, True


def _may_be_group(function: object) -> bool:
    try:
        return level_of(function) == "group"
    except WorkflowError:  # a finding about the workflow reports it
        return True
