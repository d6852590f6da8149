"""Agents that give up on requests and send them again: one answer of each is trained, and every token is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web
from fake_server import Body, FakeServer, event, output, serving
from scripted import tokenizer

from areal_like.capabilities.agents.make import Workflows
from areal_like.config.load import load
from areal_like.rollout.pool import Sampling, ServerPool
from areal_like.rollout.sglang.http import Deadline
from areal_like.types import Prompt, Reward, Trajectory, generated_in

OWN = tokenizer("plain")
GROUPS, SAMPLES = 8, 2
AGENTS = {
    "client of OpenAI": """
import openai
async def run(row, client):
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, timeout=0.7, max_retries=1000) as own:
        own._calculate_retry_timeout = lambda *_: 0.0
        await own.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
    return 1.0
""",
    "client of Anthropic": """
import anthropic
async def run(row, client):
    url = str(client.base_url).removesuffix("/v1/")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=client.api_key, timeout=0.7, max_retries=1000) as own:
        own._calculate_retry_timeout = lambda *_: 0.0
        await own.messages.create(model="policy", max_tokens=8, messages=[{"role": "user", "content": "x"}])
    return 1.0
""",
    "tries of its own": """
import openai
async def run(row, client):
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, timeout=0.7, max_retries=0) as own:
        for _ in range(1000):
            try:
                await own.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
                return 1.0
            except openai.APITimeoutError:
                pass
""",
    "time limits of its own": """
import asyncio
async def run(row, client):
    for _ in range(1000):
        asking = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
        try:
            await asyncio.wait_for(asking, 0.7)
            return 1.0
        except TimeoutError:
            pass
""",
}


def stalling() -> FakeServer:
    """A server that says three tokens of every other response, and then nothing until it is aborted."""
    count = 0

    async def generate(server: FakeServer, body: Body) -> Any:
        nonlocal count
        stalls = [count + place for place in range(len(body["input_ids"]))]
        count += len(stalls)

        async def say(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            for place, number in enumerate(stalls):
                is_whole = number % 2 == 1
                tokens = [5, 6, 7, *([OWN.eos_token_ids[0]] if is_whole else [])]
                part = output(tokens, server.version, reason="stop" if is_whole else None)
                await response.write(event(place, part))
            waiting = {rid for rid, number in zip(body["rid"], stalls, strict=True) if number % 2 == 0}
            while waiting - {aborted["rid"] for aborted in server.bodies("/abort_request")}:
                await asyncio.sleep(0.01)
            return response

        return say

    return FakeServer(generate)


async def no_score(prompt: Prompt, responses: Sequence[Any]) -> list[Reward]:
    raise AssertionError("nobody asked")


LONG = ("client of Anthropic",)  # its library takes seconds to import


@pytest.mark.parametrize("agent", [pytest.param(it, marks=[pytest.mark.long] if it in LONG else []) for it in AGENTS])
def test_an_agent_that_asks_again_has_one_trajectory(agent, write, tmp_path, processes):
    (file := tmp_path / "agent.py").write_text(AGENTS[agent])
    config = load(write(), [f"workflow={file}:run", "episode.endpoint=true", "episode.max_turns=1000"]).config
    server = stalling()

    async def main() -> tuple[list[list[Trajectory]], dict[str, float], ServerPool]:
        async with serving(server) as urls, ServerPool(urls, "token", 600, prefill_once=False) as pool:
            async with pool.interrupt(0, Deadline(60)):
                server.version = "0"
            async with Workflows(config, pool, no_score, OWN, print, 1000, processes) as workflows:  # type: ignore[arg-type]
                workflow = workflows.train(Sampling(8, stop_token_ids=OWN.eos_token_ids), SAMPLES)
                groups = await asyncio.gather(*(workflow(Prompt(i, [], row={}), i) for i in range(GROUPS)))
                counts = workflows.counts()
            while pool.tokens_generated != pool.tokens.total():  # what was aborted last
                await asyncio.sleep(0.01)
            return groups, counts, pool

    groups, counts, pool = asyncio.run(main())
    assert [len(group) for group in groups] == [SAMPLES] * GROUPS  # and no further one of an answer that nobody read
    assert all(item.generated.sum() == 4 and item.reward == 1.0 for group in groups for item in group)
    assert counts["episodes/done"] == counts["turns/first"] == GROUPS * SAMPLES
    assert counts["turns/aborted"] > 0 and len(server.bodies("/abort_request")) > 0
    assert pool.tokens["delivered"] == sum(generated_in(group) for group in groups)
    assert pool.tokens["cancelled"] > 0
