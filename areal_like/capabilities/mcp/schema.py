"""MCP servers whose tools episodes may call: `episode.mcp_servers`."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from areal_like.config.section import Section


class McpServerConfig(Section):
    """An MCP server: a program that speaks over its standard input and output, or a URL."""

    command: str | None = Field(None, min_length=1)
    """Program that each event loop of a worker starts."""
    args: list[str] = Field([])
    """Arguments of the program."""
    env: dict[str, str] = Field({})
    """Environment variables of the program, in addition to PATH, HOME and similar."""
    url: str | None = Field(None, min_length=1)
    """URL of a running server (Streamable HTTP)."""
    timeout_s: float = Field(60.0, gt=0)
    """Maximum seconds of the start, and of a call of a tool."""

    @model_validator(mode="after")
    def _has_one_way(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("an MCP server has either `command` or `url`; set one of them")
        if self.url is not None and (self.args or self.env):
            raise ValueError("`args` and `env` are those of a program; leave them out beside `url`")
        return self


class McpKeys(Section):
    """MCP servers of episodes."""

    mcp_servers: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,32}$")], McpServerConfig] = Field({})
    """MCP servers by name, each with `command`, `args` and `env`, or `url`, and `timeout_s` (60). A workflow with a
    parameter `tools` is given their tools ([MCP servers](workflows.md#mcp-servers))."""


KEYS = {"episode": McpKeys}
