"""Checks that a run provides the parameters that its workflows ask for by name, such as `sandbox`."""

import inspect
from collections.abc import Iterator

from allocation.diagnostics import Finding
from areal_like.capabilities.agents.forms import WorkflowError, level_of
from areal_like.core.config.findings import finding, warn_ignored
from areal_like.core.config.schema import RunConfig
from areal_like.core.user_code import UserCodeError, load_object


def check_takers(
    config: RunConfig, parameter: str, key: str, fix: str, *, code: str, is_set: bool
) -> Iterator[Finding]:
    """Check that workflows have the parameter only if `key` is set, and that one may use it if `key` is set."""
    wanted = dict(_find_takers(config, parameter))
    if is_set and not wanted:
        yield warn_ignored(key, f"no workflow has a parameter `{parameter}`")
    for workflow, is_optional in wanted.items():
        if not (is_set or is_optional):
            yield finding(code, workflow, f"the workflow has a parameter `{parameter}`, and {key} is not set", fix)


def _find_takers(config: RunConfig, parameter: str) -> Iterator[tuple[str, bool]]:
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
