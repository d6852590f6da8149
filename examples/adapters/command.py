"""Run any program as an agent, in a process and a Python environment of its own. AGENT_COMMAND is the command.

The program receives the row as JSON on standard input. The environment variables of OpenAI's and Anthropic's clients
point to the run's servers, past any proxy. The program prints the reward as its last word. Requires
`episode.endpoint=true`.
"""

import asyncio
import json
import os
import shlex
import signal
from asyncio.subprocess import PIPE
from contextlib import suppress
from urllib.parse import urlsplit


async def run(row, client):
    url = str(client.base_url).rstrip("/")
    address = {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": client.api_key,
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": client.api_key,
    }
    command = shlex.split(os.environ["AGENT_COMMAND"])
    environment = os.environ | address | without_proxy(urlsplit(url).hostname, os.environ)
    async with Errors() as errors:
        agent = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=errors.pipe, env=environment, process_group=0
        )
        try:
            output = await exchange(agent, json.dumps(row).encode())
        finally:
            with suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)  # ends its children too
            await agent.wait()
        last = await errors.last_line()
    if agent.returncode:
        raise RuntimeError(f"the agent ended with exit code {agent.returncode}: {last}")
    try:
        return float(output.split()[-1])
    except (IndexError, ValueError):
        printed = output.decode(errors="replace")[-200:]
        raise RuntimeError(f"the agent's last word is not a reward: {printed!r}; on standard error: {last}") from None


def without_proxy(host, environment):
    """Return variables that exempt a host from the proxy, besides the hosts that are exempt already."""
    names = ("no_proxy", "NO_PROXY")
    exempt = {name: environment.get(name) or next(filter(None, map(environment.get, names)), "") for name in names}
    return {name: value if value.strip() == "*" else f"{value},{host}".lstrip(",") for name, value in exempt.items()}


async def exchange(agent, row):
    """Send the row and return the output of an agent that has ended; it need not read the row."""
    with suppress(BrokenPipeError, ConnectionResetError):
        agent.stdin.write(row)
        await agent.stdin.drain()
    agent.stdin.close()
    output = await agent.stdout.read()
    await agent.wait()
    return output


class Errors:
    """The standard error of an agent: copied to the workflow's, with its last line.

    The pipe is not asyncio's, whose `wait` also waits for processes that left the agent's group and hold the pipe.
    """

    async def __aenter__(self):
        self._end, stream = b"", asyncio.StreamReader()
        end, self.pipe = os.pipe()
        protocol = asyncio.StreamReaderProtocol(stream)
        self._reading, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(end, "rb", 0))
        self._copying = asyncio.create_task(self._copy(stream))
        return self

    async def __aexit__(self, *_):
        self._copying.cancel()
        self._reading.close()
        self._close_pipe()

    def _close_pipe(self):
        if self.pipe is not None:
            os.close(self.pipe)
            self.pipe = None

    async def _copy(self, stream):
        while part := await stream.read(65536):
            os.write(2, part)
            self._end = (self._end + part)[-4096:]

    async def last_line(self):
        """Return the last line, after the end of the agent; another process may hold the pipe open."""
        self._close_pipe()
        await asyncio.wait([self._copying], timeout=1)
        lines = self._end.decode(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else "(it printed nothing on standard error)"
