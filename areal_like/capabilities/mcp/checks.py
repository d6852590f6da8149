"""Checks of MCP servers: a workflow is given the tools that it asks for, and every server starts."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from allocation.diagnostics import Finding
from areal_like.capabilities.agents.settings import episode_of
from areal_like.capabilities.agents.takers import find_takers
from areal_like.capabilities.mcp.parameter import NAME
from areal_like.capabilities.mcp.schema import McpKeys
from areal_like.capabilities.mcp.servers import McpError, probe
from areal_like.core.config.findings import finding, warn_ignored
from areal_like.core.config.keys import with_keys
from areal_like.known import Known

_KEY = "episode.mcp_servers"


def check_mcp_servers(known: Known) -> Iterator[Finding]:
    """Check that workflows get the tools that they ask for; start every server, except in a dry run."""
    servers = with_keys(episode_of(known.config), McpKeys).mcp_servers
    if not known.config.workflows:
        return
    wanted = dict(find_takers(known.config, NAME))
    if not servers:
        for key, is_optional in wanted.items():
            if not is_optional:
                message = f"the workflow has a parameter `tools`, and {_KEY} is empty"
                yield finding("RUN-MCP", key, message, f"set {_KEY}={{NAME: {{command: PROGRAM}}}}")
        return
    if not wanted:
        yield warn_ignored(_KEY, "no workflow has a parameter `tools`")
    if known.dry_run:
        return
    try:
        with ThreadPoolExecutor(1) as thread:  # the caller may have an event loop
            thread.submit(asyncio.run, probe(servers)).result()
    except McpError as error:
        yield finding("RUN-MCP", _KEY, str(error), "correct this server, or leave it out")
