"""Trained is what the agent has read, whatever a proxy does to its requests and answers."""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import anthropic
import httpx
import httpx2
import openai
import pytest
from limits import HUNG_S
from scripted import END, Model, tokenizer
from unreliable_proxy import Fault, UnreliableProxy

from areal_like.capabilities.agents.attempts import Sending
from areal_like.capabilities.agents.endpoint import Endpoint
from areal_like.capabilities.agents.openai_api import OpenSessions
from areal_like.capabilities.agents.schema import EpisodeConfig
from areal_like.capabilities.agents.session import Limits, Request, Session
from areal_like.capabilities.agents.turn import Turn
from areal_like.core.rollout.pool import Response, Sampling
from areal_like.core.types import Prompt, Reward

GIVES_UP_S = 1.0  # of a client whose answer is held back; it has no other effect on what is trained
TRIES = 50
OWN = tokenizer("plain")
HELLO = [{"role": "user", "content": "x"}]


class Numbered(Model):
    """Answers `1`, `2`, ...; those of the numbers in `endless` never come."""

    def __init__(self, endless: Sequence[int] = ()) -> None:
        super().__init__(lambda n: [*OWN.encode_text(f"{n + 1}"), OWN.eos_token_ids[0]])
        self.endless, self.generating, self.aborted = endless, 0, 0

    async def sample(self, tokens: Sequence[int], sampling: Sampling, **_: object) -> Response:
        self.generating += 1
        try:
            response = await super().sample(tokens, sampling)
            if len(self.asked) in self.endless:
                await asyncio.Event().wait()
            return response
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.generating -= 1


@contextmanager
def served(model: Model, turns: int = 99, **settings: Any) -> Iterator[tuple[Session, str, str]]:
    """A session of a model, its address and its key."""
    sessions = OpenSessions()
    recorded = Session(OWN, model.sample, Sampling(1000, 0.7, stop_token_ids=OWN.eos_token_ids), Limits(turns, 10**6))
    with Endpoint(sessions, EpisodeConfig(**settings)) as endpoint, sessions.open(recorded) as key:
        yield recorded, endpoint.base_url, key


def with_openai(url: str, key: str) -> Callable[[list[Any]], str]:
    """Its client repeats requests and says so."""
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=TRIES, timeout=GIVES_UP_S)
    client._calculate_retry_timeout = lambda *_: 0.0  # type: ignore[method-assign, assignment]

    def ask(messages: list[Any]) -> str:
        return str(client.chat.completions.create(model="policy", messages=messages).choices[0].message.content)

    return ask


def with_openai_streams(url: str, key: str) -> Callable[[list[Any]], str]:
    """An answer that breaks off is asked for again by the agent; the key of the request says so."""
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=TRIES, timeout=GIVES_UP_S)
    client._calculate_retry_timeout = lambda *_: 0.0  # type: ignore[method-assign, assignment]

    def ask(messages: list[Any]) -> str:
        own = {"Idempotency-Key": str(uuid.uuid4())}
        for _ in range(TRIES):
            try:
                stream = client.chat.completions.create(
                    model="policy", messages=messages, stream=True, extra_headers=own
                )
                return "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            except (openai.APIError, httpx.TransportError):
                pass
        raise AssertionError("no answer")

    return ask


def with_anthropic(url: str, key: str) -> Callable[[list[Any]], str]:
    """Its client repeats requests and says so."""
    client = anthropic_client(url, key)

    def ask(messages: list[Any]) -> str:
        message = client.messages.create(model="policy", max_tokens=99, messages=messages)
        return "".join(block.text for block in message.content if block.type == "text")

    return ask


def with_anthropic_streams(url: str, key: str) -> Callable[[list[Any]], str]:
    """An answer that breaks off is asked for again by the agent; the key of the request says so."""
    client = anthropic_client(url, key)

    def ask(messages: list[Any]) -> str:
        own = {"Idempotency-Key": str(uuid.uuid4())}
        for _ in range(TRIES):
            try:
                with client.messages.stream(
                    model="policy", max_tokens=99, messages=messages, extra_headers=own
                ) as stream:
                    return stream.get_final_text()
            except (anthropic.APIError, httpx2.TransportError):  # its own kind of httpx
                pass
        raise AssertionError("no answer")

    return ask


def anthropic_client(url: str, key: str) -> anthropic.Anthropic:
    """Return a client that repeats requests without a pause."""
    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=TRIES, timeout=GIVES_UP_S)
    client._calculate_retry_timeout = lambda *_: 0.0  # type: ignore[method-assign, assignment]
    return client


def with_own_retries(url: str, key: str) -> Callable[[list[Any]], str]:
    """An agent that asks again itself, so that no request says that it is a repetition."""
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=GIVES_UP_S)

    def ask(messages: list[Any]) -> str:
        for _ in range(TRIES):
            try:
                return str(client.chat.completions.create(model="policy", messages=messages).choices[0].message.content)
            except openai.APIConnectionError:
                pass
        raise AssertionError("no answer")

    return ask


def converse(ask: Callable[[list[Any]], str], turns: int) -> list[str]:
    """The answers that an agent reads in a conversation."""
    messages: list[Any] = [*HELLO]
    for _ in range(turns):
        messages += [{"role": "assistant", "content": ask(messages)}, {"role": "user", "content": "y"}]
    return [message["content"] for message in messages if message["role"] == "assistant"]


def trained(recorded: Session) -> list[list[str]]:
    """The answers that are trained on, by trajectory, with their end tokens left out."""
    items = recorded.trajectories(Prompt(0, []), 0, Reward(1.0))
    texts = (OWN.decode(item.tokens[item.generated].tolist(), special=True) for item in items)
    return [[answer for answer in text.split(END) if answer] for text in texts]


CLIENTS = [with_openai, with_openai_streams, with_anthropic, with_anthropic_streams]
STREAMS = (with_openai_streams, with_anthropic_streams)
FAULTS: list[list[Fault]] = [
    ["none", "lose_answer"],
    ["lose_answer", "lose_answer", "none", "lose_answer"],
    ["cut_answer"],
    ["hold_answer", "none", "hold_answer"],
    ["hold_answer", "lose_answer", "cut_answer", "none", "lose_answer"],
]


@pytest.mark.parametrize("faults", FAULTS, ids=lambda faults: "-".join(faults))
@pytest.mark.parametrize("make", CLIENTS)
def test_behind_a_proxy_what_the_agent_has_read_is_trained_and_nothing_else(make, faults):
    with served(Numbered()) as (recorded, url, key):
        with UnreliableProxy(url, faults) as proxy:
            read = converse(make(proxy.base_url, key), 3)
        assert trained(recorded) == [read]
        assert recorded.repeated >= sum(fault != "none" for fault in faults)


@pytest.mark.parametrize("make", [*CLIENTS, with_own_retries])
def test_a_request_that_a_proxy_sends_twice_is_trained_once(make):
    """The answer that is not passed on is aborted where its connection closes first, or both requests have one key."""
    model = Numbered(endless=() if make in STREAMS else (2, 5))
    faults: list[Fault] = ["twice", "none", "twice"]
    with served(model) as (recorded, url, key), UnreliableProxy(url, faults) as proxy:
        read = converse(make(proxy.base_url, key), 3)
        assert trained(recorded) == [read]


@pytest.mark.parametrize("make", STREAMS)
def test_a_request_that_is_answered_twice_has_one_answer_by_its_key(make):
    with served(Numbered()) as (recorded, url, key), UnreliableProxy(url, ["both", "none", "both"]) as proxy:
        read = converse(make(proxy.base_url, key), 3)
        assert trained(recorded) == [read] == [["1", "2", "3"]]
        assert recorded.repeated == 2


@pytest.mark.parametrize("make", [*CLIENTS, with_own_retries])
def test_a_request_whose_client_has_left_is_aborted(make):
    """Every other answer never comes; the client gives up, and asks again."""
    model = Numbered(endless=(1, 3, 5))
    with served(model, turns=4) as (recorded, url, key):
        read = converse(make(url, key), 3)
        assert trained(recorded) == [read]
        assert model.aborted == recorded.attempts.aborted == len(model.asked) - 3 >= 3
    assert model.generating == 0


@pytest.mark.parametrize("at_once", [False, True], ids=["in_turn", "at_once"])
def test_equal_requests_are_samples_unless_one_says_that_it_is_a_repetition(at_once):
    async def ask(url: str, key: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=2) as client:
            asking = [client.chat.completions.create(model="policy", messages=HELLO) for _ in range(4)]
            done = await asyncio.gather(*asking) if at_once else [await each for each in asking]
            return [str(completion.choices[0].message.content) for completion in done]

    with served(Numbered()) as (recorded, url, key):
        read = asyncio.run(ask(url, key))
        assert sorted(read) == ["1", "2", "3", "4"]
        assert sorted(trained(recorded)) == [[answer] for answer in sorted(read)]


def session_of(model: Model) -> Session:
    return Session(OWN, model.sample, Sampling(1000, 0.7, stop_token_ids=OWN.eos_token_ids), Limits(99, 10**6))


def text(turn: Turn) -> str:
    return str(turn.messages[-1]["content"])


def test_a_retry_gets_the_unread_answer_or_the_latest_and_each_is_repeated_once():
    recorded, request = session_of(Numbered()), Request(HELLO)

    async def run() -> None:
        first, second, third = [await recorded.complete(request) for _ in range(3)]
        assert [text(turn) for turn in (first, second, third)] == ["1", "2", "3"]
        second.delivered = False
        assert [await recorded.complete(request, Sending(retries=1)) for _ in range(2)] == [second, third]
        second.delivered = True
        assert text(await recorded.complete(request, Sending(retries=2))) == "3"
        shorter = Request(HELLO, max_tokens=9)  # not an equal one
        assert text(await recorded.complete(shorter, Sending(retries=1))) == "4"
        second.delivered = False
        assert await recorded.complete(request) is second  # still unread
        second.delivered = True
        assert text(await recorded.complete(request)) == "5"

    asyncio.run(run())


def test_a_retry_of_what_was_aborted_is_a_request_of_its_own():
    model = Numbered(endless=(2,))
    recorded, request = session_of(model), Request(HELLO)

    async def run() -> None:
        first = await recorded.complete(request)
        given_up = asyncio.create_task(recorded.complete(request))
        while len(model.asked) < 2:
            await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        again = await recorded.complete(request, Sending(retries=1))
        assert (text(first), text(again)) == ("1", "3")

    asyncio.run(run())
    assert (recorded.attempts.aborted, recorded.repeated) == (1, 0)


def test_what_one_client_leaves_another_one_still_waits_for():
    model = Numbered(endless=(1,))
    recorded, sent = session_of(model), Sending("key")

    async def run() -> None:
        one, other = [asyncio.create_task(recorded.complete(Request(HELLO), sent)) for _ in range(2)]
        while not model.generating:
            await asyncio.sleep(0)
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)
        assert model.generating == 1 and not other.done()
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        await asyncio.sleep(0)
        assert model.generating == 0

    asyncio.run(run())


def test_an_answer_that_nobody_has_read_is_not_trained_unless_the_conversation_goes_on_from_it():
    recorded = session_of(Numbered())
    branch = [*HELLO, {"role": "assistant", "content": "1"}, {"role": "user", "content": "y"}]

    async def run() -> None:
        for messages in (HELLO, [{"role": "user", "content": "other"}]):
            (await recorded.complete(Request(messages))).delivered = False
        assert trained(recorded) == [] and recorded.tokens_orphaned == 4
        (await recorded.complete(Request(branch))).delivered = False
        assert trained(recorded) == [["1"]] and [text(turn) for turn in recorded.orphans] == ["2", "3"]

    asyncio.run(run())


def test_what_an_episode_still_waits_for_ends_with_it():
    model, sessions = Numbered(endless=(1,)), OpenSessions()
    recorded = session_of(model)
    with (
        Endpoint(sessions, EpisodeConfig()) as endpoint,
        sessions.open(recorded) as key,
        ThreadPoolExecutor() as threads,
    ):
        url, headers = f"{endpoint.base_url}/chat/completions", {"x-api-key": key}
        asking = threads.submit(httpx.post, url, json={"messages": HELLO}, headers=headers, timeout=HUNG_S)
        while not model.generating:
            time.sleep(0.01)
        sessions.close(key)
        assert asking.result().status_code == 409
    assert (model.aborted, model.generating) == (1, 0)


def asked_by_hand(url: str, *lines: str, body: Iterable[bytes] = ()) -> str:
    """The answer to a request whose body may never come."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=HUNG_S) as connection:
        connection.sendall("\r\n".join(["POST /v1/messages HTTP/1.1", "Host: here", *lines, "", ""]).encode())
        for part in body:
            connection.sendall(part)
        with connection.makefile("rb") as reader:
            return reader.read().decode()


def test_a_key_is_looked_at_before_the_body_is_read():
    with served(Numbered()) as (_, url, _key):
        answer = asked_by_hand(url, "x-api-key: wrong", "Content-Length: 200000000")
    assert answer.startswith("HTTP/1.1 401") and "the API key does not belong to a running episode" in answer


def test_a_request_has_a_size_limit():
    model, most = Numbered(), 1 << 20
    with served(model, endpoint_max_mb=1) as (_, url, key):
        answer = asked_by_hand(url, f"x-api-key: {key}", f"Content-Length: {most + 1}")
        assert answer.startswith("HTTP/1.1 413") and "more than 1 MB" in answer
        part = b"%x\r\n%b\r\n" % (1 << 16, b" " * (1 << 16))
        parts = [part] * (most // len(part) + 2)  # of a body that does not say how long it is
        with suppress(ConnectionError):  # the rest of the body is sent to a closed connection
            assert asked_by_hand(url, f"x-api-key: {key}", "Transfer-Encoding: chunked", body=parts)[9:12] == "413"
        assert model.asked == []
        body = {"messages": [{"role": "user", "content": "x" * (most // 16)}]}  # a token each
        reply = httpx.post(f"{url}/chat/completions", json=body, headers={"x-api-key": key}, timeout=HUNG_S)
        assert reply.status_code == 200
