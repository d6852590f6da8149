"""Tools of MCP servers for workflows: `async def run(row, client, tools)`.

Each event loop of a worker process starts a server for the first episode that needs it, and shares it with later ones.
A server in which a call has reached its time limit is replaced for later calls.
"""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from areal_like.capabilities.mcp.schema import McpServerConfig

_BETWEEN = "__"  # a server's name and a tool's


class McpError(Exception):
    """An MCP server failed to start or has ended; the message has the reason."""


@dataclass(frozen=True)
class ToolResult:
    """The answer of a tool, as text for the model. `is_error` is set if the call failed, with the reason as text."""

    text: str
    is_error: bool = False


class _Connection:
    """One running server, held open by a task of its own, because the opening task must close it."""

    def __init__(self, name: str, settings: McpServerConfig) -> None:
        loop = asyncio.get_running_loop()
        self._name, self._settings = name, settings
        self._started: asyncio.Future[tuple[Any, list[Any]]] = loop.create_future()
        self._over = asyncio.Event()
        self._calls = 0
        self._is_retired = False
        # in a context of its own: it belongs to no episode
        self.task = loop.create_task(self._hold(), context=contextvars.Context())

    async def wait(self) -> tuple[Any, list[Any]]:
        """Return the client and the tools once the server has started. Raises McpError."""
        return await asyncio.shield(self._started)

    @asynccontextmanager
    async def calling(self) -> AsyncIterator[None]:
        """Keep the server open while the body runs."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._close_if_unused()

    def retire(self) -> None:
        """Close the server as soon as no call runs."""
        self._is_retired = True
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_retired and not self._calls:
            self._over.set()

    async def _hold(self) -> None:
        try:
            async with asyncio.timeout(self._settings.timeout_s) as limit:
                async with _client(self._settings) as client:
                    tools = await _list(client)
                    limit.reschedule(None)
                    self._started.set_result((client, tools))
                    await self._over.wait()
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, TimeoutError):
                error = TimeoutError(f"it did not start within {self._settings.timeout_s:g} s")
            if not self._started.done():
                where = f"The MCP server {self._name} (episode.mcp_servers) does not start: {_reason(error)}"
                self._started.set_exception(McpError(where))
                self._started.exception()  # asyncio would report an exception that is never retrieved
            if isinstance(error, asyncio.CancelledError):
                raise


class Servers:
    """The MCP servers of one worker process, which has several event loops."""

    def __init__(self) -> None:
        self._open: dict[tuple[asyncio.AbstractEventLoop, str], _Connection] = {}

    def find(self, name: str, settings: McpServerConfig) -> _Connection:
        """Return the connection of this event loop, which may still be starting."""
        key = asyncio.get_running_loop(), name
        if key not in self._open or self._open[key].task.done():
            self._open[key] = _Connection(name, settings)
        return self._open[key]

    def retire(self, name: str, connection: _Connection) -> None:
        """Let later calls start another server."""
        key = asyncio.get_running_loop(), name
        if self._open.get(key) is connection:
            del self._open[key]
        connection.retire()

    async def close(self) -> None:
        """Stop the servers of this event loop."""
        loop = asyncio.get_running_loop()
        own = [self._open.pop(key) for key in list(self._open) if key[0] is loop]
        for connection in own:
            connection.retire()
        await asyncio.gather(*(connection.task for connection in own))


class Tools:
    """The tools of the run's MCP servers; the name of each is SERVER__TOOL."""

    def __init__(self, servers: Servers, settings: Mapping[str, McpServerConfig]) -> None:
        self._servers, self._settings = servers, settings

    async def list(self) -> list[dict[str, Any]]:
        """Return the tools in the format of chat completions. Raises McpError if a server does not start."""
        connections = [(name, self._servers.find(name, settings)) for name, settings in self._settings.items()]
        return [_as_function(name, tool) for name, each in connections for tool in (await each.wait())[1]]

    async def call(self, name: str, arguments: str | Mapping[str, Any]) -> ToolResult:
        """Call a tool; the arguments may be those of a model's call, as JSON.

        A call that fails because of the model's arguments, in the tool or at its time limit returns the reason as
        result. Raises McpError if the server does not start, or has ended.
        """
        server, _, tool = name.partition(_BETWEEN)
        if server not in self._settings:
            return ToolResult(f"The tool {name} is unknown.", is_error=True)
        try:
            values = orjson.loads(arguments) if isinstance(arguments, str) else dict(arguments)
        except orjson.JSONDecodeError as error:
            return ToolResult(f"The arguments are not JSON: {error}", is_error=True)
        if not isinstance(values, dict):
            return ToolResult("The arguments are not an object.", is_error=True)
        connection = self._servers.find(server, self._settings[server])
        client, tools = await connection.wait()
        if tool not in [each.name for each in tools]:
            return ToolResult(f"The tool {name} is unknown.", is_error=True)
        async with connection.calling():
            return await self._call(server, connection, client.call_tool(tool, values))

    async def _call(self, server: str, connection: _Connection, calling: Any) -> ToolResult:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        limit_s = self._settings[server].timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return _as_text(await calling)
        except TimeoutError:
            self._servers.retire(server, connection)
            return ToolResult(f"The tool did not answer within {limit_s:g} s.", is_error=True)
        except MCPError as error:
            if error.error.code != CONNECTION_CLOSED:
                return ToolResult(str(error), is_error=True)
            self._servers.retire(server, connection)
            raise McpError(f"The MCP server {server} (episode.mcp_servers) ended during a call.") from error


async def probe(servers: Mapping[str, McpServerConfig]) -> None:
    """Start every server, list its tools, and stop it. Raises McpError."""
    own = Servers()
    try:
        await Tools(own, servers).list()
    finally:
        await own.close()


def _client(settings: McpServerConfig) -> Any:
    """Return a `mcp` client that is not connected yet. Raises McpError if the package is missing."""
    try:
        from mcp import Client, StdioServerParameters
    except ImportError as error:
        raise McpError("the package `mcp` is missing. Install it: `pip install 'mcp>=2.3'`") from error
    if settings.url is not None:
        return Client(settings.url)
    return Client(StdioServerParameters(command=str(settings.command), args=settings.args, env=settings.env))


async def _list(client: Any) -> list[Any]:
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def _as_function(server: str, tool: Any) -> dict[str, Any]:
    described = {"description": tool.description} if tool.description else {}
    function = {"name": f"{server}{_BETWEEN}{tool.name}", **described, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _as_text(result: Any) -> ToolResult:
    """Return a result's text; other content is replaced by its type, because the model reads only text."""
    parts = [block.text if block.type == "text" else f"[{block.type}]" for block in result.content]
    return ToolResult("\n".join(parts), result.is_error)


def _reason(error: BaseException) -> str:
    """Return the message of an error; of an exception group, the first one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{error}" if isinstance(error, McpError | TimeoutError) else f"{type(error).__name__}: {error}"
