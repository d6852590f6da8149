"""Requests recorded from the clients that agents use: each is answered, or rejected for one field that it names.

`client_requests.jsonl` has them as openai 3.57.0, anthropic 2.14.0, openai-agents 0.24.0, LiteLLM 1.110.2, LangChain
(langchain-openai 1.7.4, langchain-anthropic 1.7.10), Pydantic AI 2.68.0 and Claude Code 2.1.197 send them, the latter
with fewer tools and shortened texts.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from limits import HUNG_S
from scripted import answer, says, session

from areal_like.capabilities.agents.endpoint import Endpoint
from areal_like.capabilities.agents.ignored_fields import DEFAULTS, INERT
from areal_like.capabilities.agents.openai_api import OpenSessions
from areal_like.capabilities.agents.schema import EpisodeConfig
from areal_like.capabilities.agents.session import Limits, Session
from areal_like.core.config.findings import ConfigError
from areal_like.core.config.load import load
from areal_like.core.types import Prompt, Reward
from areal_like.data.tokenizer import Tokenizer

pytestmark = pytest.mark.covers("agents")

RECORDED = [json.loads(line) for line in (Path(__file__).parent / "client_requests.jsonl").read_text().splitlines()]
CLAUDE_CODE = ("thinking", "context_management", "output_config")
HELLO: list[Any] = [{"role": "user", "content": "x"}]
APIS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9},
    "/v1/responses": {"input": "x"},
}


async def parse(text: str, tools: Any) -> Any:
    before, called, command = text.partition("!")
    return (before, [("Bash", {"command": command, "description": "say hello"})]) if called else (text, [])


def recorded_session(*texts: str, ignored: tuple[str, ...] = ()) -> tuple[Session, Any]:
    limits = Limits(99, 10**6, models=["*"], ignored_fields=ignored)
    return session(
        "strips_thinking", says(*(texts or "a"), template="strips_thinking"), limits=limits, parse_tools=parse
    )


def send(own: Session, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    reply = asyncio.run(answer(own, "POST", path.partition("?")[0], json.dumps(body).encode()))
    return reply.status, reply.content if body.get("stream") else json.loads(reply.content)


def name(row: dict[str, Any]) -> str:
    return f"{row['client']} {row['method']} {row['path']}"


@pytest.mark.parametrize("row", RECORDED, ids=name)
def test_recorded_requests_are_answered(row):
    """Through HTTP with the client's headers, with the fields ignored that Claude Code and LiteLLM need."""
    own, model = recorded_session(ignored=(*CLAUDE_CODE, "verbosity", "text.verbosity"))
    sessions = OpenSessions()
    with (
        Endpoint(sessions, EpisodeConfig()) as endpoint,
        sessions.open(own) as key,
        httpx.Client(trust_env=False, timeout=HUNG_S) as http,
    ):
        headers = {each: value.replace("KEY", key) for each, value in row["headers"].items()}
        url = endpoint.base_url.removesuffix("/v1") + row["path"]
        reply = http.request(row["method"], url, json=row["body"], headers=headers)
    assert reply.status_code == 200, reply.text
    assert len(model.asked) == (0 if row["method"] == "GET" or "count_tokens" in row["path"] else 1)


REJECTED = {
    ("claude-code", "thinking"): 2,
    ("claude-tools", "thinking"): 2,
    ("claude-policy", "output_config.format"): 1,
    ("claude-policy", "thinking"): 1,
    ("litellm", "thinking"): 1,
    ("openai", "verbosity"): 1,
    ("openai", "text.verbosity"): 1,
}


def test_recorded_requests_are_rejected_by_default_for_fields_that_are_named():
    """`context_management` of Claude Code comes first, and is taken out to see the next one."""
    found: dict[tuple[str, str], int] = {}
    for row in (row for row in RECORDED if row["method"] == "POST"):
        own, _ = recorded_session(ignored=("context_management",))
        status, reply = send(own, row["path"], row["body"] | {"stream": False})
        if status != 200:
            param = reply["error"]["param"]
            assert f"`episode.ignored_fields=[{param}]`" in reply["error"]["message"]
            found[row["client"], param] = found.get((row["client"], param), 0) + 1
    assert found == REJECTED


def test_a_conversation_of_claude_code_is_one_trajectory():
    """The second request has the tool's result, and moves the mark of the prompt cache."""
    first, second = (row for row in RECORDED if row["client"] == "claude-tools")
    own, model = recorded_session("L|e|t| |m|e|.|!|e|c|h|o| |h|e|l|l|o", "3", ignored=CLAUDE_CODE)
    assert [send(own, row["path"], row["body"])[0] for row in (first, second)] == [200, 200]
    (item,) = own.trajectories(Prompt(0, []), 0, Reward(1.0))
    assert item.tokens[: len(model.asked[0])].tolist() == model.asked[0]
    assert own.tokenizer.decode(item.tokens[item.generated].tolist()) == "Let me.!echo hello3"
    prompt = own.tokenizer.decode(model.asked[1], special=True)
    assert "<|turn|>system\nAvailable agent types" in prompt and "<|turn|>tool\nhello" in prompt


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("field", sorted(INERT))
def test_inert_fields_change_nothing(path, field):
    for value in (None, True, False, "x", {"a": 1}):
        (own, model), (_, plain) = recorded_session(), (other := recorded_session())
        assert send(own, path, APIS[path] | {field: value})[0] == send(other[0], path, APIS[path])[0] == 200
        assert model.asked == plain.asked


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("field", sorted(DEFAULTS))
def test_defaults_are_accepted_and_other_values_rejected_unless_ignored(path, field):
    other = {"messages": HELLO, "a": 7}
    cases: list[tuple[Any, tuple[str, ...], int]] = [
        *((value, (), 200) for value in (None, DEFAULTS[field][0])),
        (other, (), 400),
        (other, (field,), 200),
    ]
    for value, ignored, status in cases:
        own, _ = recorded_session(ignored=ignored)
        found, reply = send(own, path, APIS[path] | {field: value})
        assert found == status
        assert status == 200 or (reply["error"]["param"], field in reply["error"]["message"]) == (field, True)


@pytest.mark.parametrize("path", APIS)
def test_any_rejected_field_can_be_ignored(path):
    cases: list[tuple[dict[str, Any], str]] = [
        ({"seed": 3}, "seed"),
        ({"temperature": 0}, "temperature"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"nonsense": [1]}, "nonsense"),
        ({"nonsense": {"a": 1}}, "nonsense"),
    ]
    for fields, ignored in cases:
        own, model = recorded_session()
        assert send(own, path, APIS[path] | fields)[0] == 400 and not model.asked
        own, model = recorded_session(ignored=(ignored,))
        assert send(own, path, APIS[path] | fields)[0] == 200 and len(model.asked) == 1


def test_a_part_of_a_field_can_be_ignored():
    body = APIS["/v1/messages"] | {"output_config": {"effort": "low", "format": {"type": "json_schema"}}}
    for ignored, status in [((), 400), (("output_config.format",), 200), (("output_config.effort",), 400)]:
        assert send(recorded_session(ignored=ignored)[0], "/v1/messages", body)[0] == status


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/chat/completions", "reasoning_effort", "low"),
        ("/v1/responses", "reasoning", {"effort": "low", "summary": "auto"}),
        ("/v1/messages", "output_config", {"effort": "low"}),
    ],
)
def test_effort_reaches_templates_that_read_it(path, field, value):
    own, model = recorded_session()
    plain = own.tokenizer
    own.tokenizer = Tokenizer(plain.backend, plain.eos_token_ids, "{{ reasoning_effort }}{{ messages[0].content }}")
    assert send(own, path, APIS[path] | {field: value})[0] == 200
    assert own.tokenizer.decode(model.asked[0]) == "lowx"


def test_a_field_that_is_needed_cannot_be_ignored(write):
    assert load(write(), ["episode.ignored_fields=[thinking,output_config.format]"]).config.episode.ignored_fields
    for field in ("messages", "stream", "''"):
        with pytest.raises(ConfigError):
            load(write(), [f"episode.ignored_fields=[{field}]"])


def test_tokens_are_counted_as_the_next_prompt_has_them():
    own, model = recorded_session("<think>t</think>1", "3")
    messages = [*HELLO, {"role": "assistant", "content": "<think>t</think>1"}, {"role": "user", "content": "y"}]
    body = {"messages": messages, "system": "s", "tools": [{"name": "add", "input_schema": {"type": "object"}}]}
    before = {**body, "messages": HELLO}
    counted = []
    for each in (before, body):
        status, reply = send(own, "/v1/messages/count_tokens", each)
        assert status == 200
        counted.append(reply["input_tokens"])
        assert send(own, "/v1/messages", each | {"max_tokens": 9**3})[1]["usage"]["input_tokens"] == counted[-1]
    assert counted == [len(asked) for asked in model.asked] and len(own.turns) == 2
    assert len(own.trajectories(Prompt(0, []), 0, Reward(1.0))) == 1
    assert send(own, "/v1/messages/count_tokens", {"messages": 7})[0] == 400


def test_clients_count_tokens_and_look_models_up():
    own, model = recorded_session()
    own.limits = Limits(1, 10**6, models=["policy", "claude-*"])
    sessions = OpenSessions()
    with Endpoint(sessions, EpisodeConfig()) as endpoint, sessions.open(own) as key:
        first = anthropic.Anthropic(base_url=endpoint.base_url.removesuffix("/v1"), auth_token=key, api_key=None)
        second = openai.OpenAI(base_url=endpoint.base_url, api_key=key)
        for _ in range(3):  # counts are not turns
            assert first.messages.count_tokens(model="claude-x", messages=HELLO).input_tokens > 0
        assert first.models.retrieve("claude-x").id == second.models.retrieve("claude-x").id == "claude-x"
        assert [each.id for each in first.models.list()] == ["policy"]
        with pytest.raises(anthropic.NotFoundError):
            first.models.retrieve("gpt-9")
    assert not model.asked


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer "])
def test_the_scheme_of_a_key_may_have_small_letters(scheme):
    own, _ = recorded_session()
    sessions = OpenSessions()
    with sessions.open(own) as key:
        for headers in (
            {"authorization": f"{scheme} {key}"},
            {"x-api-key": "none", "authorization": f"{scheme} {key}"},
        ):
            assert sessions.find(headers) is own
        assert sessions.find({"authorization": f"Basic {key}"}) is sessions.find({"authorization": key}) is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "reason", "sequence"),
    [
        ([], "end_turn", None),
        (["x"], "end_turn", None),
        (["1"], "stop_sequence", "1"),
        (["th", " 1"], "stop_sequence", " 1"),
        (["<|turn|>"], "end_turn", None),
    ],
)
def test_the_stop_sequence_of_a_message_is_named(stream, stop, reason, sequence):
    own, _ = recorded_session("ab 1th")
    sessions = OpenSessions()
    with Endpoint(sessions, EpisodeConfig()) as endpoint, sessions.open(own) as key:
        client = anthropic.Anthropic(base_url=endpoint.base_url.removesuffix("/v1"), api_key=key)
        asked: dict[str, Any] = {"model": "m", "max_tokens": 99, "messages": HELLO, "stop_sequences": stop}
        if stream:
            with client.messages.stream(**asked) as events:
                message: Any = events.get_final_message()
        else:
            message = client.messages.create(**asked)
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    assert message.content[0].text == "ab 1th".partition(sequence or "#")[0]


def test_a_stop_text_ends_other_apis_as_theirs_do():
    assert (
        send(recorded_session("ab 1")[0], "/v1/chat/completions", {"messages": HELLO, "stop": "1"})[1]["choices"][0][
            "finish_reason"
        ]
        == "stop"
    )
    assert send(recorded_session("ab 1")[0], "/v1/responses", {"input": "x", "stop": ["1"]})[1]["status"] == "completed"
    assert send(recorded_session()[0], "/v1/messages", APIS["/v1/messages"] | {"stop_sequences": "a"})[0] == 400
