"""Requests that are wrong get a status and an error of the client's API; an episode beside them notices nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from limits import HUNG_S
from scripted import says, session

from areal_like.capabilities.agents.endpoint import Endpoint
from areal_like.capabilities.agents.openai_api import OpenSessions
from areal_like.capabilities.agents.schema import EpisodeConfig
from areal_like.capabilities.agents.session import Limits
from areal_like.core.rollout.pool import Response, Sampling
from areal_like.core.types import Prompt, Reward

HELLO: list[Any] = [{"role": "user", "content": "x"}]
LIMITS = Limits(9, 10**6, models=["policy", "default", "claude-*"])


class Open:
    """An endpoint with two episodes: `own` sends what is wrong, `other` waits for an answer meanwhile."""

    def __init__(self, stack: ExitStack) -> None:
        self.sessions = OpenSessions()
        self.url = stack.enter_context(Endpoint(self.sessions, EpisodeConfig())).base_url
        self.http = stack.enter_context(httpx.Client(trust_env=False, timeout=HUNG_S))
        self.asked, self.answer = threading.Event(), threading.Event()
        self.own, self.model = session("plain", says("ab", "th"), limits=LIMITS, parse_tools=parse)
        self.other, model = session("plain", says("th"), limits=LIMITS)

        async def wait(tokens: Sequence[int], sampling: Sampling, **options: Any) -> Response:
            self.asked.set()
            assert await asyncio.to_thread(self.answer.wait, HUNG_S)
            return await model.sample(tokens, sampling, **options)

        self.other.sample = wait  # type: ignore[assignment]
        self.key, self.other_key = (stack.enter_context(self.sessions.open(one)) for one in (self.own, self.other))

    def client(self, key: str = "") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=key or self.key, max_retries=0, http_client=self.http)

    def post(self, path: str, body: bytes, key: str = "", **headers: str) -> httpx.Response:
        sent = {"x-api-key": key or self.key, "content-type": "application/json", **headers}
        return self.http.post(self.url + path, content=body, headers=sent)

    def ask(self, key: str = "") -> str | None:
        answer = self.client(key).chat.completions.create(model="policy", messages=HELLO, timeout=HUNG_S)
        return answer.choices[0].message.content


async def parse(text: str, tools: Any) -> Any:
    return text, []


@contextmanager
def opened() -> Iterator[Open]:
    """An endpoint whose other episode is in the middle of an answer; afterwards it has it, and both are trained."""
    with ExitStack() as stack:
        both = Open(stack)
        with ThreadPoolExecutor(1) as beside:
            waiting = beside.submit(both.ask, both.other_key)
            try:
                assert both.asked.wait(HUNG_S)
                yield both
            finally:
                both.answer.set()
            assert waiting.result(HUNG_S) == "th"
        (item,) = both.other.trajectories(Prompt(0, []), 0, Reward(1.0))
        assert item.generated.any() and len(both.other.turns) == 1


def tool(**changes: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, **changes}}]}


def said(**message: Any) -> dict[str, Any]:
    return {"messages": [message]}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


CHAT = [
    ({"model": "gpt-9"}, 404, "The model `gpt-9` does not exist.* policy, default.* `episode.models`"),
    ({"model": 7}, 400, "model: 7 is not a name"),
    (tool(parameters="none"), 400, r"tools\[0\]\.function\.parameters"),
    (tool(parameters={"type": "object", "properties": {"a": {"type": "money"}}}), 400, r"not a JSON schema: \$\.prop"),
    (tool(parameters={"type": "string"}), 400, "the arguments of a tool are an object"),
    (tool(parameters=nested(300)), 400, "nested more than 254 levels deep"),
    (tool(parameters=nested(120)), 400, "nested too deeply"),
    (tool(name=""), 400, r"tools\[0\]\.function\.name"),
    (tool(description=["x"]), 400, r"tools\[0\]\.function\.description"),
    ({"tools": "add"}, 400, "tools"),
    (said(role="robot", content="x"), 400, r"messages\[0\]\.role: Input should be 'system'"),
    (said(role="user", content=7), 400, r"messages\[0\]\.content"),
    (said(role="user", content={"text": "x"}), 400, r"messages\[0\]\.content"),
    (said(role="user", content=[{"type": "text", "text": 7}]), 400, r"messages\[0\]\.content\[0\]\.text"),
    (said(role="user", content=[{"type": "image_url"}]), 400, "from text alone"),
    (said(content="x"), 400, r"messages\[0\]\.role"),
    ({"messages": []}, 400, "messages"),
    ({"messages": "x"}, 400, "messages"),
    ({"max_tokens": "many"}, 400, "max_tokens"),
    ({"stream": "yes"}, 400, "stream"),
    ({"temperature": "hot"}, 400, "temperature"),
]


@pytest.mark.parametrize(("changes", "status", "words"), CHAT, ids=lambda each: str(each)[:40])
def test_a_wrong_chat_completion_gets_an_error_of_openai(changes, status, words):
    body = {"model": "policy", "messages": HELLO, **changes}
    with opened() as both:
        with pytest.raises(openai.APIStatusError, match=words) as refused:
            both.client().post("/chat/completions", body=body, cast_to=object)
        error: Any = refused.value.body
        assert refused.value.status_code == status and {"message", "type", "param", "code"} <= set(error)
        if status == 404:
            assert isinstance(refused.value, openai.NotFoundError) and error["code"] == "model_not_found"
        assert both.model.asked == [] and both.ask() == "ab"


MESSAGES = [
    ({"model": "gpt-9"}, 404, "not_found_error", "`episode.models`"),
    ({"tools": [{"name": "add", "input_schema": {"type": "money"}}]}, 400, "invalid_request_error", "input_schema"),
    ({"tools": [{"name": "add", "input_schema": []}]}, 400, "invalid_request_error", "input_schema"),
    (said(role="robot", content="x"), 400, "invalid_request_error", "role"),
    (said(role="user", content=7), 400, "invalid_request_error", "content"),
    (said(role="user", content=[{"type": "video"}]), 400, "invalid_request_error", "from text alone"),
    ({"max_tokens": -1}, 400, "invalid_request_error", "max_tokens"),
    ({"system": 7}, 400, "invalid_request_error", "system"),
]


@pytest.mark.parametrize(("changes", "status", "kind", "words"), MESSAGES, ids=lambda each: str(each)[:40])
def test_a_wrong_message_gets_an_error_of_anthropic(changes, status, kind, words):
    body = {"model": "claude-x", "max_tokens": 9, "messages": HELLO, **changes}
    with opened() as both:
        reply = both.post("/messages", json.dumps(body).encode())
        content = reply.json()
        assert reply.status_code == status and (content["type"], content["error"]["type"]) == ("error", kind)
        assert words in content["error"]["message"]
        assert both.model.asked == []
        right = {"model": "claude-x", "max_tokens": 9, "messages": HELLO}
        assert both.post("/messages", json.dumps(right).encode()).is_success


BROKEN = [b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"model": "\xff"}', b'{"messages": ' + b"[" * 5000]


@pytest.mark.parametrize("body", BROKEN, ids=lambda each: repr(each[:20]))
@pytest.mark.parametrize("path", ["/chat/completions", "/messages"])
def test_broken_json_gets_a_status(path, body):
    with opened() as both:
        reply = both.post(path, body)
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
        assert "the body is not" in reply.json()["error"]["message"] and both.ask() == "ab"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("PUT", "/chat/completions", 404), ("DELETE", "/models/x", 404), ("POST", "/embeddings", 404), ("GET", "/", 404)],
)
def test_what_is_not_served_gets_an_error_of_the_api(method, path, status):
    with opened() as both:
        reply = both.http.request(method, both.url + path, headers={"x-api-key": both.key})
        assert reply.status_code == status and "is not served" in reply.json()["error"]["message"]


def test_a_request_of_100_mb_is_refused_with_its_reason():
    with opened() as both:
        with pytest.raises(openai.APIStatusError, match=r"more than 32 MB .episode.endpoint_max_mb") as refused:
            both.client().chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "x" * (100 << 20)}]
            )
        assert refused.value.status_code == 413 and refused.value.body["type"] == "request_too_large"  # type: ignore[index]
        reply = both.post("/messages", (b"x" * (1 << 20) for _ in range(100)))  # type: ignore[arg-type]
        assert reply.status_code == 413 and "32 MB" in reply.json()["error"]["message"]
        assert both.ask() == "ab"


def test_a_connection_that_stays_after_the_end_of_its_episode_gets_a_status():
    with opened() as both:
        host, port = both.url.removeprefix("http://").removesuffix("/v1").split(":")
        body = json.dumps({"model": "policy", "messages": HELLO})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nx-api-key: {both.key}\r\n"
        with socket.create_connection((host, int(port)), timeout=HUNG_S) as kept:
            for status in (b"200", b"401"):  # the second request is sent when the episode has ended
                kept.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
                answer = b""
                while b'"error"' not in answer and b'"usage"' not in answer:
                    part = kept.recv(65536)
                    assert part
                    answer += part
                assert answer.split()[1] == status
                both.sessions.close(both.key)
            while kept.recv(65536):  # until the endpoint closes the connection
                pass
        assert len(both.own.turns) == 1


def test_a_request_that_waits_when_its_episode_ends_gets_a_status():
    with opened() as both, ThreadPoolExecutor(1) as pool:
        third, _ = session("plain", says("ab"))
        asked = threading.Event()

        async def never(*_: Any, **__: Any) -> Response:
            asked.set()
            return await asyncio.get_running_loop().create_future()

        third.sample = never  # type: ignore[assignment]
        with both.sessions.open(third) as key:
            waiting = pool.submit(both.ask, key)
            assert asked.wait(HUNG_S)
        with pytest.raises(openai.ConflictError, match="the episode is over"):
            waiting.result(HUNG_S)
        assert both.ask() == "ab" and not third.turns


def test_names_of_models_are_listed():
    with opened() as both:
        assert [model.id for model in both.client().models.list()] == ["policy", "default"]
        both.own.limits = replace(LIMITS, models=["*"])
        assert [model.id for model in both.client().models.list()] == ["policy"]
        body = {"model": "gpt-9", "messages": HELLO}
        assert both.post("/chat/completions", json.dumps(body).encode()).json()["model"] == "gpt-9"


def test_arguments_that_are_nested_too_deeply_stay_text():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "[" * 900 + "]" * 900}}
    with opened() as both:
        history = [
            *HELLO,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ]
        body = {"model": "policy", "messages": history}
        assert both.client().post("/chat/completions", body=body, cast_to=object)
