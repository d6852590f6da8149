"""Tools of MCP servers in episodes: real servers of the official package over standard input and output."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from known import found_in
from limits import HUNG_S
from playing import ASK, Pool, score
from scripted import tokenizer

from areal_like.capabilities.agents.forms import WorkflowError, level_of
from areal_like.capabilities.agents.make import Workflows
from areal_like.capabilities.mcp.schema import McpServerConfig
from areal_like.capabilities.mcp.servers import McpError, Servers, Tools
from areal_like.config.load import load
from areal_like.rollout.pool import Sampling
from areal_like.types import Prompt

SERVER = """
import os, sys, time
from mcp.server import MCPServer
server = MCPServer("calculator")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

@server.tool()
def number() -> int:
    return os.getpid()

@server.tool()
def environment() -> str:
    return os.environ["OWN"]

@server.tool()
def fail() -> int:
    raise ValueError("a reason")

@server.tool()
async def hang() -> int:
    time.sleep(10**6)  # the whole server hangs

@server.tool()
def leave() -> int:
    os._exit(3)

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
server.run()
"""


@pytest.fixture
def server(tmp_path: Path) -> Callable[..., dict[str, McpServerConfig]]:
    pytest.importorskip("mcp")
    file = tmp_path / "mcp_server_of_a_test.py"
    file.write_text(SERVER)

    def server(timeout_s: float = HUNG_S) -> dict[str, McpServerConfig]:
        settings = {
            "command": sys.executable,
            "args": [str(file)],
            "env": {"OWN": "ab", "PYTHONPATH": ":".join(sys.path)},
        }
        return {"own": McpServerConfig.model_validate({**settings, "timeout_s": timeout_s})}

    return server


def with_tools(settings: dict[str, McpServerConfig], body: Callable[[Tools], Any]) -> Any:
    async def run() -> Any:
        servers = Servers()
        try:
            return await body(Tools(servers, settings))
        finally:
            await servers.close()

    return asyncio.run(run())


def test_tools_are_listed_and_called(server):
    async def body(tools: Tools) -> None:
        functions = {each["function"]["name"]: each["function"] for each in await tools.list()}
        assert functions["own__add"]["description"] == "Add two numbers."
        assert functions["own__add"]["parameters"]["required"] == ["a", "b"]
        assert (await tools.call("own__add", '{"a": 1, "b": 2}')).text == "3"
        assert (await tools.call("own__environment", {})).text == "ab"
        same = {(await tools.call("own__number", {})).text for _ in range(2)}
        assert len(same) == 1  # one server for all calls
        for name, arguments, words in (
            ("own__add", '{"a": "x", "b": 2}', "a"),
            ("own__add", "{", "The arguments are not JSON"),
            ("own__add", "[1]", "The arguments are not an object"),
            ("own__divide", "{}", "The tool own__divide is unknown"),
            ("add", "{}", "The tool add is unknown"),
            ("own__fail", "{}", "Error executing tool fail"),
        ):
            result = await tools.call(name, arguments)
            assert result.is_error and words in result.text

    with_tools(server(), body)


def test_a_call_that_hangs_costs_that_call_alone(server):
    settings = server()

    async def body(tools: Tools) -> None:
        first = (await tools.call("own__number", {})).text
        settings["own"] = settings["own"].model_copy(update={"timeout_s": 0.5})
        hung = await tools.call("own__hang", {})
        assert hung.is_error and "did not answer within 0.5 s" in hung.text
        settings["own"] = settings["own"].model_copy(update={"timeout_s": HUNG_S})
        second = (await tools.call("own__number", {})).text
        assert second != first  # a new server; the old one ends
        assert await asyncio.to_thread(ends, int(first))  # the event loop ends it

    with_tools(settings, body)


def test_a_server_that_ends_fails_the_call_and_starts_again(server):
    async def body(tools: Tools) -> None:
        with pytest.raises(McpError, match=r"own .episode.mcp_servers. ended during a call"):
            await tools.call("own__leave", {})
        assert (await tools.call("own__add", {"a": 1, "b": 1})).text == "2"

    with_tools(server(), body)


def test_a_server_that_does_not_start_says_why():
    pytest.importorskip("mcp")
    broken = {"x": McpServerConfig(command="/none/server")}
    with pytest.raises(McpError, match=r"x .episode.mcp_servers. does not start: .*(No such file|not found)"):
        with_tools(broken, lambda tools: tools.list())
    silent = {"x": McpServerConfig(command="sleep", args=["100000"], timeout_s=0.5)}
    with pytest.raises(McpError, match=r"did not start within 0\.5 s"):
        with_tools(silent, lambda tools: tools.list())


@pytest.fixture
def url(tmp_path: Path, server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server over HTTP."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    own = server()["own"]
    process = subprocess.Popen([sys.executable, *own.args, str(port)], env={**os.environ, **own.env})
    try:
        limit = time.monotonic() + HUNG_S
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def test_a_server_at_a_url(url):
    settings = {"own": McpServerConfig(url=url, timeout_s=HUNG_S)}

    async def body(tools: Tools) -> None:
        assert next(each["function"]["name"] for each in await tools.list()) == "own__add"
        assert (await tools.call("own__add", '{"a": 1, "b": 2}')).text == "3"
        assert (await tools.call("own__fail", {})).is_error
        same = {(await tools.call("own__number", {})).text for _ in range(2)}
        assert len(same) == 1
        settings["own"] = settings["own"].model_copy(update={"timeout_s": 0.5})
        hung = await tools.call("own__hang", {})
        assert hung.is_error and "did not answer within 0.5 s" in hung.text
        with pytest.raises(McpError, match=r"own .episode.mcp_servers. does not start: .*within 0\.5 s"):
            await tools.call("own__add", {"a": 1, "b": 1})  # the server elsewhere still hangs

    with_tools(settings, body)


def test_a_url_without_a_server_says_why(monkeypatch):
    pytest.importorskip("mcp")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    nobody = {"x": McpServerConfig(url="http://127.0.0.1:1/mcp", timeout_s=HUNG_S)}
    with pytest.raises(McpError, match=r"x .episode.mcp_servers. does not start: .*onnect"):
        with_tools(nobody, lambda tools: tools.list())
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        there = f"http://127.0.0.1:{silent.getsockname()[1]}/mcp"
        with pytest.raises(McpError, match=r"did not start within 0\.5 s"):
            with_tools({"x": McpServerConfig(url=there, timeout_s=0.5)}, lambda tools: tools.list())


def ends(pid: int) -> bool:
    limit = time.monotonic() + HUNG_S
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > limit:
                return False
            time.sleep(0.02)
    return True


AGENT = (
    "async def run(row, client, tools):\n"
    + f"    await {ASK}\n"
    + "    assert [tool['function']['name'] for tool in await tools.list()][0] == 'own__add'\n"
    "    return {'reward': float((await tools.call('own__add', {'a': 1, 'b': 2})).text),\n"
    "            'pid': float((await tools.call('own__number', {})).text)}\n"
)


def test_an_episode_calls_tools_and_the_servers_end_with_the_run(write, tmp_path, server):
    file = tmp_path / "workflow.py"
    file.write_text(AGENT)
    settings = {name: each.model_dump(exclude_defaults=True) for name, each in server().items()}
    overrides = [f"workflow={file}:run", "episode.workers=1", "episode.loops=1", f"episode.mcp_servers={settings}"]
    config, own, said = load(write(), overrides).config, tokenizer("plain"), list[str]()
    assert [found.message for found in found_in(config)] == []

    async def main() -> list[Any]:
        async with Workflows(config, Pool(), score, own, said.append, 1000) as workflows:  # type: ignore[arg-type]
            workflow = workflows.train(Sampling(8, stop_token_ids=own.eos_token_ids), 2)
            return list(await workflow(Prompt(0, [7], row={"question": "x"}), 0))

    items = asyncio.run(main())
    assert [item.reward for item in items] == [3.0, 3.0] and not said
    (pid,) = {int(item.reward_parts["pid"]) for item in items}
    assert ends(pid)


GROUP = (
    "async def run(prompt, n, rollout):\n"
    "    names = [tool['function']['name'] for tool in await rollout.tools.list()]\n"
    "    result = await rollout.tools.call(names[0], {'a': 1, 'b': 2})\n"
    "    response = await rollout.sample(prompt.tokens)\n"
    "    return [rollout.trajectory([prompt.tokens, response], float(result.text))]\n"
)


def test_a_group_calls_tools(write, tmp_path, server, processes):
    file = tmp_path / "workflow.py"
    file.write_text(GROUP)
    settings = {name: each.model_dump(exclude_defaults=True) for name, each in server().items()}
    overrides = [f"workflow={file}:run"]
    config = load(write(), [*overrides, f"episode.mcp_servers={settings}"]).config
    own, said = tokenizer("plain"), list[str]()
    assert [found.message for found in found_in(config)] == []

    async def play(config: Any) -> list[Any]:
        async with Workflows(config, Pool(), score, own, said.append, 1000, processes) as workflows:  # type: ignore[arg-type]
            workflow = workflows.train(Sampling(8, stop_token_ids=own.eos_token_ids), 2)
            return list(await workflow(Prompt(0, [7], row={"question": "x"}), 0))

    assert [item.reward for item in asyncio.run(play(config))] == [3.0] and not said
    assert asyncio.run(play(load(write(), overrides).config)) == []
    assert "the run has no MCP servers: set episode.mcp_servers" in said[0]


def test_what_is_wrong_is_found_before_a_run(write, tmp_path):
    file = tmp_path / "workflow.py"
    file.write_text(AGENT)

    def codes(*overrides: str) -> list[str]:
        config = load(write(), [f"workflow={file}:run", *overrides]).config
        return [found.code for found in found_in(config)]

    assert codes() == ["RUN-MCP-NEEDED"]
    assert codes("episode.mcp_servers={x: {command: /none/server}}") == ["RUN-MCP-START"]
    with pytest.raises(WorkflowError, match=r"use `rollout\.tools`"):
        level_of(group_with_tools)
    wrong: list[dict[str, Any]] = [{}, {"command": "a", "url": "b"}, {"url": "b", "args": ["c"]}]
    for settings in wrong:
        with pytest.raises(ValueError, match=r"MCP server|are those of a program"):
            McpServerConfig.model_validate(settings)


async def group_with_tools(prompt: Any, n: Any, rollout: Any, tools: Any) -> list[Any]:
    return []
