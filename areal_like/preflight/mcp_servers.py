"""Checks of MCP servers: a workflow is given the tools that it asks for, and every server starts."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from allocation.diagnostics import Finding
from areal_like.config.findings import finding, warn_ignored
from areal_like.config.schema import RunConfig
from areal_like.preflight.workflow_parameters import find_takers
from areal_like.workflows.mcp_servers import PARAMETER, McpError, probe

_KEY = "episode.mcp_servers"


def check_mcp_servers(config: RunConfig, *, dry_run: bool = False) -> Iterator[Finding]:
    """Check that workflows get the tools that they ask for; start every server, except in a dry run."""
    servers, wanted = config.episode.mcp_servers, dict(find_takers(config, PARAMETER, groups=True))
    if not servers:
        for key, is_optional in wanted.items():
            if not is_optional:
                message = f"the workflow has a parameter `tools`, and {_KEY} is empty"
                yield finding("RUN-MCP", key, message, f"set {_KEY}={{NAME: {{command: PROGRAM}}}}")
        return
    if not wanted:
        yield warn_ignored(_KEY, "no workflow has a parameter `tools`")
    if dry_run:
        return
    try:
        with ThreadPoolExecutor(1) as thread:  # the caller may have an event loop
            thread.submit(asyncio.run, probe(servers)).result()
    except McpError as error:
        yield finding("RUN-MCP", _KEY, str(error), "correct this server, or leave it out")
