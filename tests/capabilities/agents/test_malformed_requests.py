"""Whatever JSON a client sends, it is answered or refused in words; nothing raises."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import answer, session, tokenizer

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
OPENAI = {
    "model": "policy",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "x"}], "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "y"},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "description": "d", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "temperature": 0.7,
    "top_p": 1,
    "max_tokens": 5,
    "stop": ["z"],
    "stream": False,
    "logprobs": True,
    "chat_template_kwargs": {"enable_thinking": False},
}
ANTHROPIC = {
    "model": "policy",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "ab"},
                {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "3"}]},
                {"type": "text", "text": "y"},
            ],
        },
    ],
    "tools": [{"name": "add", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["z"],
    "stream": True,
    "metadata": {"user_id": "u"},
    "thinking": {"type": "disabled"},
}
REQUESTS = {"/v1/chat/completions": OPENAI, "/v1/messages": ANTHROPIC}
WORDS = (
    "",
    "text",
    "image",
    "user",
    "assistant",
    "tool_use",
    "tool_result",
    "function",
    "any",
    "self",
    "\ue000turn\ue001",
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(WORDS)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=3), inner),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to everything within a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*path, key)
        yield from places(inner, (*path, key))


@st.composite
def mutated(draw: st.DrawFn, request: dict[str, Any]) -> dict[str, Any]:
    """A request with one to three places removed, doubled, or something else, or with a field more."""
    result = copy.deepcopy(request)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from([*places(result)] or [("messages",)]))
        holder: Any = result
        for key in path[:-1]:
            holder = holder[key]
        match draw(st.sampled_from(["remove", "replace", "add"])):
            case "remove":
                del holder[path[-1]]
            case "replace":
                holder[path[-1]] = draw(JSON)
            case "add" if isinstance(holder, list):
                holder.insert(path[-1], draw(JSON))
            case "add":
                holder[draw(st.sampled_from(WORDS))] = draw(JSON)
    return result


async def parse(text: str, tools: Any) -> Any:
    return text, [("add", {"a": 1})]


def reply_to(path: str, *bodies: bytes) -> Any:
    own = tokenizer("strips_thinking")
    recorded, _ = session(
        "strips_thinking", lambda n: [*own.encode_text("ab"), own.eos_token_ids[0]], parse_tools=parse
    )
    *_, last = (asyncio.run(answer(recorded, "POST", path, body)) for body in bodies)
    return last


@pytest.mark.parametrize("path", REQUESTS)
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_request_is_answered_or_refused_in_words(path, data):
    body = json.dumps(data.draw(mutated(REQUESTS[path]))).encode()
    reply = reply_to(path, orjson.dumps(REQUESTS[path]), body)
    assert reply.status in (200, 400)
    if reply.status == 400:
        error = orjson.loads(reply.content)["error"]
        assert error["type"] == "invalid_request_error" and len(error["message"]) > 10


@pytest.mark.parametrize("path", REQUESTS)
def test_the_requests_are_valid(path):
    assert reply_to(path, orjson.dumps(REQUESTS[path])).status == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"messages": [' + b"[" * 5000, b'{"model": "\xff"}'])
@pytest.mark.parametrize("path", REQUESTS)
def test_a_body_that_is_no_object_is_refused(path, body):
    assert reply_to(path, body).status == 400


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "tool_use", "name": "add", "input": {}}, "messages[0].content[0].tool_use.id: Field required"),
        ({"type": "tool_result"}, "messages[0].content[0].tool_result.tool_use_id: Field required"),
        ({"type": "text"}, "messages[0].content[0].text.text: Field required"),
        ({"type": "image", "source": {}}, "messages[0].content[0] is image: the run generates from text alone"),
        ("x", "messages[0].content[0]"),
    ],
)
def test_a_block_that_lacks_something_is_named(block, words):
    request = {"messages": [{"role": "user", "content": [block]}]}
    assert words in orjson.loads(reply_to("/v1/messages", orjson.dumps(request)).content)["error"]["message"]
