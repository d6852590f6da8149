"""MCP servers: their tools for episodes."""

from areal_like.capabilities.mcp.checks import check_mcp_servers
from areal_like.capability import Capability

CAPABILITY = Capability(checks=[check_mcp_servers])
