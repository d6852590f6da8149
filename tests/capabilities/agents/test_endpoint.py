"""The same API on loopback, in OpenAI's words and in Anthropic's, for an episode's own key alone."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from typing import Any

import httpx
import pytest
from limits import HUNG_S
from scripted import END, says, session

from areal_like.capabilities.agents.endpoint import Endpoint
from areal_like.capabilities.agents.openai_api import OpenSessions
from areal_like.capabilities.agents.playing import Clients
from areal_like.capabilities.agents.schema import EpisodeConfig
from areal_like.core.rollout.pool import Sampling
from areal_like.core.types import Prompt, Reward

QUESTION = {"model": "any", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
AGENT = """
import openai
client = openai.OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY say where
messages = [{"role": "user", "content": "x"}]
answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message
messages += [answer, {"role": "user", "content": "y"}]
print(client.chat.completions.create(model="policy", messages=messages).choices[0].message.content)
"""


def test_an_agent_in_another_process_is_recorded():
    recorded, model = session("plain", says("ab", "th"))

    async def run() -> tuple[str, httpx.Response]:
        sessions = OpenSessions()
        with Endpoint(sessions, EpisodeConfig()) as endpoint:
            with sessions.open(recorded) as key:
                client = Clients(sessions.answer, endpoint.base_url).with_key(key)
                url = str(client.base_url)
                environment = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": client.api_key, "PATH": "/usr/bin:/bin"}
                agent = await asyncio.create_subprocess_exec(
                    sys.executable, "-c", AGENT, env=environment, stdout=subprocess.PIPE
                )
                output, _ = await agent.communicate()
            async with httpx.AsyncClient(trust_env=False) as http:
                late = await http.post(url + "chat/completions", json=QUESTION, headers={"x-api-key": key})
            return output.decode().strip(), late

    said, late = asyncio.run(run())
    assert said == "th"
    assert (late.status_code, late.json()["error"]["message"]) == (
        401,
        "the API key does not belong to a running episode",
    )
    (item,) = recorded.trajectories(Prompt(0, []), 0, Reward(1.0))
    assert item.tokens.tolist() == [*model.asked[1], *model.answered[1].tokens.tolist()]
    assert recorded.tokenizer.decode(item.tokens[item.generated].tolist(), special=True) == f"ab{END}th{END}"


def post(recorded: Any, *requests: tuple[str, dict[str, Any]], key: str | bytes | None = None) -> list[httpx.Response]:
    sessions = OpenSessions()
    with (
        Endpoint(sessions, EpisodeConfig()) as endpoint,
        sessions.open(recorded) as own,
        httpx.Client(trust_env=False, timeout=HUNG_S) as http,
    ):
        headers = {"x-api-key": own if key is None else key}
        return [http.post(endpoint.base_url + path, json=body, headers=headers) for path, body in requests]


@pytest.mark.parametrize("adapter", [None, "math"])
def test_every_request_of_an_agent_uses_the_adapter_of_its_episode(adapter):
    recorded, model = session("plain", says("ab", "th"), sampling=Sampling(9, 0.7, adapter=adapter))
    used = []

    async def sample(tokens: Any, sampling: Sampling, **more: Any) -> Any:
        used.append(sampling.adapter)
        return await model.sample(tokens, sampling, **more)

    recorded.sample = sample
    replies = post(recorded, ("/chat/completions", QUESTION | {"temperature": 0.5}), ("/messages", QUESTION))
    assert [reply.status_code for reply in replies] == [200, 200]
    assert used == [adapter] * 2


def test_a_wrong_key_reaches_nothing():
    recorded, model = session("plain", says("ab"))
    for key in ("", "another", "é".encode()):
        (reply,) = post(recorded, ("/messages", QUESTION), key=key)
        assert reply.status_code == 401 and "key" in reply.json()["error"]["message"]
    assert model.asked == []


TOOL = {"name": "add", "input_schema": {"type": "object"}}


async def parse(text: str, tools: Any) -> Any:
    assert tools == [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    return ("", [("add", {"a": 1})]) if "add" in text else (text, [])


def test_messages_of_anthropic_are_the_same_conversation():
    recorded, model = session("strips_thinking", says("<th>add", "3"), parse_tools=parse)
    asked: dict[str, Any] = QUESTION | {"tools": [TOOL], "system": [{"type": "text", "text": "ab"}]}
    (first,) = post(recorded, ("/messages", asked))
    called = first.json()
    assert called["stop_reason"] == "tool_use" and called["usage"]["output_tokens"] == len(model.answered[0].tokens)
    (use,) = called["content"]
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "add", {"a": 1})
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "3"}]}
    history = [
        *asked["messages"],
        {"role": "assistant", "content": called["content"]},
        {"role": "user", "content": [result]},
    ]
    (second,) = post(recorded, ("/messages", asked | {"messages": history, "stream": True}))
    streamed = [json.loads(line[6:]) for line in second.text.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in streamed] == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert streamed[2]["delta"]["text"] == "3" and streamed[4]["delta"]["stop_reason"] == "end_turn"
    assert model.asked[1][: len(model.asked[0])] == model.asked[0]
    assert len(recorded.trajectories(Prompt(0, []), 0, Reward(1.0))) == 1
    assert "<|turn|>tool\n3" in recorded.tokenizer.decode(model.asked[1], special=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking: the chat template decides"),
        ({"temperature": 0}, "temperature: 0.0 cannot be trained on"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "is image: the run generates from text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0..role: Input should be 'user', 'assistant'"),
        ({"tools": [{"name": "add"}]}, "input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: 'any' constrains"),
        ({"container": "x"}, "container is not supported"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(changes, words):
    recorded, model = session("plain", says("ab"), parse_tools=parse)
    (reply,) = post(recorded, ("/messages", QUESTION | changes))
    assert reply.status_code == 400 and reply.json()["type"] == "error"
    assert re.search(words, reply.json()["error"]["message"])
    assert model.asked == []
