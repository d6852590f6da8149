"""Run any program as an agent, in a process and a Python environment of its own. AGENT_COMMAND is the command.

The program receives the row as JSON on standard input. The environment variables of OpenAI's and Anthropic's clients
point to the run's servers. The program prints the reward as its last word. Requires `episode.endpoint=true`.
"""

import asyncio
import json
import os
import shlex
import signal
from asyncio.subprocess import PIPE
from contextlib import suppress


async def run(row, client):
    url = str(client.base_url).rstrip("/")
    address = {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": client.api_key,
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": client.api_key,
    }
    command = shlex.split(os.environ["AGENT_COMMAND"])
    agent = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, env=os.environ | address, process_group=0
    )
    try:
        output, _ = await agent.communicate(json.dumps(row).encode())
    finally:
        with suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)  # ends its children too
        await agent.wait()
    if agent.returncode:
        raise RuntimeError(f"the agent ended with exit code {agent.returncode}")
    return float(output.split()[-1])
