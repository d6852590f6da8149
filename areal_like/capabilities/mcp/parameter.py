"""The parameter `tools` of workflows."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext

from areal_like.capabilities.agents.parameters import Parameter, Report
from areal_like.capabilities.mcp.schema import McpKeys, McpServerConfig
from areal_like.capabilities.mcp.servers import McpError, Servers, Tools
from areal_like.config.keys import with_keys
from areal_like.config.section import Section

NAME = "tools"

type Recipe = Mapping[str, McpServerConfig]


class SharedTools:
    """The tools in one worker process, whose episodes share the servers; see Provider."""

    def __init__(self) -> None:
        self._servers = Servers()

    def open(self, recipe: Recipe, report: Report) -> AbstractAsyncContextManager[Tools]:
        """Return the tools of an episode."""
        return nullcontext(self.for_group(recipe, report))

    def for_group(self, recipe: Recipe, _: Report) -> Tools:
        """Return `rollout.tools`."""
        return Tools(self._servers, recipe)


def _recipe(episode: Section) -> Recipe | None:
    return with_keys(episode, McpKeys).mcp_servers or None


PARAMETER = Parameter(
    name=NAME,
    recipe=_recipe,
    provider=SharedTools,
    missing="the run has no MCP servers: set episode.mcp_servers",
    for_group="use `rollout.tools`",
    error=McpError,
    cause="mcp",
)
