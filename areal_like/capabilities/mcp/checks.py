"""Checks of MCP servers: a workflow is given the tools that it asks for, and every server starts."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from allocation.diagnostics import Finding
from areal_like.capabilities.agents.settings import episode_of
from areal_like.capabilities.agents.takers import check_takers
from areal_like.capabilities.mcp.parameter import NAME
from areal_like.capabilities.mcp.schema import McpKeys
from areal_like.capabilities.mcp.servers import McpError, probe
from areal_like.core.config.findings import finding
from areal_like.core.config.keys import with_keys
from areal_like.known import Known

_KEY = "episode.mcp_servers"


def check_mcp_servers(known: Known) -> Iterator[Finding]:
    """Check that workflows get the tools that they ask for; start every server, except in a dry run."""
    servers = with_keys(episode_of(known.config), McpKeys).mcp_servers
    if not known.config.workflows:
        return
    fix = f"set {_KEY}={{NAME: {{command: PROGRAM}}}}"
    yield from check_takers(known.config, NAME, _KEY, fix, code="RUN-MCP", is_set=bool(servers))
    if known.dry_run or not servers:
        return
    try:
        with ThreadPoolExecutor(1) as thread:  # the caller may have an event loop
            thread.submit(asyncio.run, probe(servers)).result()
    except McpError as error:
        yield finding("RUN-MCP", _KEY, str(error), "correct this server, or leave it out")
