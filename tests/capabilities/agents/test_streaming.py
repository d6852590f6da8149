"""Streams send text as the server generates it, and what they record is what unstreamed answers record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import numpy as np
import openai
import orjson
import pytest
from aiohttp import web
from fake_server import Body, FakeServer, event, output, serving
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Model, answer, says, session, tokenizer
from serving import pool_on, serve
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from areal_like.backends.sglang.tool_calls import CALL_STARTS
from areal_like.capabilities.agents.endpoint import Endpoint
from areal_like.capabilities.agents.openai_api import OpenSessions
from areal_like.capabilities.agents.schema import EpisodeConfig
from areal_like.capabilities.agents.session import Limits, Session
from areal_like.capabilities.agents.streams import Decoding, VisibleText
from areal_like.capabilities.agents.workers.processes import in_loop
from areal_like.core.errors import ServerError
from areal_like.core.rollout.http import Deadline
from areal_like.core.rollout.pool import Response, Sampling, ServerPool
from areal_like.core.sampling_masks import KEPT
from areal_like.core.types import Prompt, Reward, Trajectory
from areal_like.data.tokenizer import Tokenizer

pytestmark = pytest.mark.covers("agents")

OWN = tokenizer("plain")
END = OWN.eos_token_ids[0]
HELLO: list[Any] = [{"role": "user", "content": "x"}]
TOOL = {"name": "add", "input_schema": {"type": "object"}}
FUNCTION: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

type Heard = tuple[list[str], list[tuple[str, Any]]]
type Stream = Callable[..., AsyncIterator[str | tuple[str, Any]]]


@asynccontextmanager
async def served(recorded: Session) -> AsyncIterator[tuple[str, str]]:
    """The address and key of a session."""
    sessions = OpenSessions()
    endpoint = Endpoint(sessions, EpisodeConfig())
    await asyncio.to_thread(endpoint.__enter__)
    try:
        with sessions.open(recorded) as key:
            yield endpoint.base_url, key
    finally:
        await asyncio.to_thread(endpoint.__exit__)


async def stream_openai(url: str, key: str, tools: bool = False, **more: Any) -> AsyncIterator[str | tuple[str, Any]]:
    """Yield texts, then name and arguments of each tool call, as OpenAI's client reads them."""
    given = {"tools": [FUNCTION]} if tools else {}
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True, **given, **more)
        async with stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    if choice.delta.content:
                        yield choice.delta.content
                    for call in choice.delta.tool_calls or ():
                        assert call.function
                        yield str(call.function.name), str(call.function.arguments)


async def stream_anthropic(
    url: str, key: str, tools: bool = False, **more: Any
) -> AsyncIterator[str | tuple[str, Any]]:
    """The same as Anthropic's client reads it."""
    given: Any = {"tools": [TOOL]} if tools else {}
    if "stop" in more:
        more["stop_sequences"] = more.pop("stop")
    address = url.removesuffix("/v1")
    asked = {"model": "m", "max_tokens": 99, "messages": HELLO, **given, **more}
    async with (
        anthropic.AsyncAnthropic(base_url=address, api_key=key, max_retries=0) as client,
        client.messages.stream(**asked) as stream,
    ):
        async for text in stream.text_stream:
            yield text
        for block in (await stream.get_final_message()).content:
            if block.type == "tool_use":
                yield block.name, block.input


BOTH = pytest.mark.parametrize("stream", [stream_openai, stream_anthropic])


class Handshake:
    """A server that sends each part of a response only when it is told to; None ends the answer without an end."""

    def __init__(self, *parts: str | None) -> None:
        self.parts = list(parts)
        self.inputs: list[list[int]] = []
        self.allowed = asyncio.Semaphore(1)

    async def generate(self, server: FakeServer, body: Body) -> Any:
        self.inputs += body["input_ids"]
        assert [params["stream_interval"] for params in body["sampling_params"]] == [1]

        async def say(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            while self.parts:
                await self.allowed.acquire()
                if (part := self.parts.pop(0)) is None:
                    self.allowed.release()
                    return response
                tokens = OWN.encode_text(part) + ([] if self.parts else [END])
                piece = output(tokens, server.version, reason=None if self.parts else "stop")
                await response.write(event(0, piece))
            return response

        return say


def on_pool(pool: ServerPool, own: Tokenizer = OWN, sampling: Sampling | None = None) -> Session:
    """A session whose answers a pool generates, in this event loop."""
    home = asyncio.get_running_loop()

    def sample(tokens: Sequence[int], sampling: Sampling, **more: Any) -> Awaitable[Response]:
        return in_loop(home, pool.sample(tokens, sampling, session=1, **more))

    return Session(own, sample, sampling or Sampling(99, stop_token_ids=own.eos_token_ids), Limits(99, 10**6))


async def with_handshake(shake: Handshake, body: Callable[[Session, str, str], Awaitable[Any]]) -> Any:
    server = FakeServer(shake.generate)
    async with serving(server) as urls, ServerPool(urls, "token", 600) as pool:
        async with pool.interrupt(0, Deadline(60)):
            server.version = "0"
        recorded = on_pool(pool)
        async with served(recorded) as (url, key):
            return await body(recorded, url, key), server


def trained(recorded: Session) -> list[list[int]]:
    items = recorded.trajectories(Prompt(0, []), 0, Reward(1.0))
    return [item.tokens[item.generated].tolist() for item in items]


@BOTH
def test_each_text_arrives_before_the_server_generates_the_next_one(stream: Stream):
    async def main() -> None:
        shake = Handshake("ab", " th", "c")

        async def read(recorded: Session, url: str, key: str) -> list[Any]:
            heard = []
            async for text in stream(url, key):
                heard.append(text)
                assert recorded.turns == [] or shake.parts == []
                shake.allowed.release()
            assert trained(recorded) == [[*OWN.encode_text("ab thc"), END]]
            return heard

        heard, _ = await with_handshake(shake, read)
        assert heard == ["ab", " th", "c"]

    asyncio.run(main())


@BOTH
def test_a_request_that_another_attempt_continues_keeps_streaming(stream: Stream):
    async def main() -> None:
        shake = Handshake("ab", None, "c")

        async def read(recorded: Session, url: str, key: str) -> list[Any]:
            heard = []
            async for text in stream(url, key):
                heard.append(text)
                shake.allowed.release()
            assert trained(recorded) == [[*OWN.encode_text("abc"), END]]
            return heard

        heard, _ = await with_handshake(shake, read)
        first, second = shake.inputs
        assert heard == ["ab", "c"] and second == [*first, *OWN.encode_text("ab")]

    asyncio.run(main())


@BOTH
def test_a_client_that_leaves_in_the_middle_leaves_nothing_to_train(stream: Stream):
    async def main() -> None:
        shake = Handshake("ab", "c")

        async def leave(recorded: Session, url: str, key: str) -> None:
            reading = stream(url, key)
            assert await anext(reading) == "ab"
            await reading.aclose()  # type: ignore[attr-defined]
            while not recorded.attempts.aborted:
                await asyncio.sleep(0.01)
            assert (trained(recorded), recorded.turns) == ([], [])

        _, server = await with_handshake(shake, leave)
        assert len(server.bodies("/abort_request")) == 1

    asyncio.run(main())


@BOTH
def test_a_server_that_fails_after_the_start_ends_the_stream_with_an_error(stream: Stream):
    async def main() -> None:
        async def sample(tokens: Sequence[int], sampling: Sampling, *, on_tokens: Any, **_: Any) -> Response:
            on_tokens(OWN.encode_text("ab"))
            await go_on.wait()
            raise ServerError("the servers are gone")

        recorded, go_on = session("plain", says("ab"))[0], asyncio.Event()
        home, recorded.sample = (
            asyncio.get_running_loop(),
            lambda *given, **more: in_loop(home, sample(*given, **more)),
        )
        async with served(recorded) as (url, key):
            reading = stream(url, key)
            assert await anext(reading) == "ab"
            go_on.set()
            with pytest.raises((openai.APIError, anthropic.APIError), match="the servers are gone"):
                await anext(reading)
        assert recorded.turns == []

    asyncio.run(main())


class Speaking(Model):
    """A model whose tokens arrive one by one."""

    async def sample(self, tokens: Sequence[int], sampling: Sampling, *, on_tokens: Any = None, **_: Any) -> Response:
        response = await super().sample(tokens, sampling)
        for token in response.tokens.tolist() if on_tokens else ():
            on_tokens([token])
            await asyncio.sleep(0)
        return response


async def parse(text: str, tools: Any) -> Any:
    before, start, _ = text.partition("<call>")
    return (before.strip(), [("add", {"a": 1})]) if start else (text, [])


def told(tokens: Sequence[int], starts: Sequence[str] | None = ("<call>",)) -> Session:
    model = Speaking(lambda _: tokens)
    sampling = Sampling(1000, 0.7, stop_token_ids=OWN.eos_token_ids)
    return Session(OWN, model.sample, sampling, Limits(99, 10**6), parse, starts)


async def whole(reading: AsyncIterator[Any]) -> Heard:
    parts = [part async for part in reading]
    return [part for part in parts if isinstance(part, str)], [part for part in parts if not isinstance(part, str)]


def test_text_is_visible_up_to_what_may_be_a_tool_call():
    visible = VisibleText(OWN, ["<call>"], special=True, trimmed=True)
    parts = [visible.add([token]) for token in OWN.encode_text(" ab <c \n<call>1")]
    assert [part for part in parts if part] == ["ab", " <c"]
    assert visible.rest(" ab <c \n<d") == " \n<d"
    hidden = VisibleText(OWN, [], special=True, trimmed=True, hidden=True)
    assert hidden.add(OWN.encode_text("ab")) == "" and hidden.rest("ab") == "ab"


@BOTH
@pytest.mark.parametrize("starts", [("<call>",), None], ids=["known", "unknown"])
def test_a_tool_call_is_sent_whole_after_the_text_before_it(stream: Stream, starts: Any):
    async def main() -> Heard:
        async with served(told([*OWN.encode_text("ab <b \n<call>1"), END], starts)) as (url, key):
            return await whole(stream(url, key, tools=True))

    texts, calls = asyncio.run(main())
    assert calls == [("add", '{"a":1}' if stream is stream_openai else {"a": 1})]
    assert "".join(texts) == "ab <b"


@BOTH
def test_a_stop_text_and_what_follows_it_are_not_sent(stream: Stream):
    async def main() -> Heard:
        async with served(told([*OWN.encode_text("ab--b---th"), END])) as (url, key):
            return await whole(stream(url, key, stop=["---"]))

    assert "".join(asyncio.run(main())[0]) == "ab--b"


def test_usage_and_log_probs_are_sent_at_the_end():
    async def main() -> list[Any]:
        options: Any = {"stream_options": {"include_usage": True}, "logprobs": True}
        async with (
            served(told([*OWN.encode_text("ab 1"), END])) as (url, key),
            openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client,
        ):
            stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True, **options)
            return [chunk async for chunk in stream]

    *_, last, counted = asyncio.run(main())
    assert [part.token for part in last.choices[0].logprobs.content] == ["ab", " 1", "<|end|>"]
    assert last.choices[0].finish_reason == "stop"
    assert (counted.choices, counted.usage.completion_tokens) == ([], 3)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, OWN.vocab_size - 1) | st.sampled_from(OWN.encode_text("<call> é ab\n")), max_size=24),
    st.lists(st.sampled_from(["ab", "a", " 1", "<|turn|>", "é", "\n\n", "b<"]), max_size=2),
    st.booleans(),
)
def test_a_stream_is_the_answer_that_is_recorded(tokens, stop, tools):
    """Whatever tokens are generated, also those of incomplete characters: only blanks at the start are left out."""

    async def main() -> tuple[str, Session]:
        recorded = told([*tokens, END])
        body: dict[str, Any] = {"messages": HELLO, "stream": True, "stop": stop or None}
        body |= {"tools": [FUNCTION]} if tools else {}
        reply = await answer(recorded, "POST", "/v1/chat/completions", orjson.dumps(body))
        lines = [line[6:] for line in reply.content.decode().split("\n\n") if line.startswith("data: {")]
        chunks = [orjson.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines]
        return "".join(chunks), recorded

    sent, recorded = asyncio.run(main())
    final = recorded.turns[0].messages[-1]["content"]
    assert sent == final or (tools and sent == final.lstrip())


def test_characters_of_several_tokens_are_sent_when_they_are_complete():
    """As in tokenizers of SentencePiece: blanks are part of words, and rare characters are bytes."""
    words = ["▁a", "b", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    own, text = Tokenizer(backend, [0]), "a ab é 漢字🙂b a"
    ids = [
        token
        for letter in ("▁a", "▁a", "b", "▁", *"é", "▁", *"漢字🙂", "b", "▁", "▁a")
        for token in (
            [backend.token_to_id(letter)]
            if backend.token_to_id(letter) is not None
            else [backend.token_to_id(f"<0x{byte:02X}>") for byte in letter.encode()]
        )
    ]
    decoding = Decoding(own, special=False)
    parts = [decoding.add(token) for token in ids]
    assert "".join(parts) == own.decode(ids) and "\ufffd" not in "".join(parts)
    assert parts[0] == "a" and "🙂" in parts, text


@pytest.mark.long  # imports SGLang
@pytest.mark.parametrize("parser", CALL_STARTS)
def test_parsers_return_the_text_before_the_start_of_a_call(parser: str):
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    detector = FunctionCallParser.ToolCallParserEnum[parser]()
    (start,) = CALL_STARTS[parser]
    assert not detector.has_tool_call(f"before {start[:-1]}")
    assert detector.detect_and_parse(f"before {start[:-1]}", []).normal_text == f"before {start[:-1]}"
    found = detector.detect_and_parse(f" before \n{start}", []).normal_text
    assert found.strip().removesuffix(start).strip() == "before"


def same(one: Trajectory, other: Trajectory) -> bool:
    kept, others = one.columns[KEPT], other.columns[KEPT]
    columns = ("tokens", "logprobs", "versions", "generated")
    return (
        all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)
        and np.array_equal(kept.ids, others.ids)
        and np.array_equal(kept.counts, others.counts)
    )


def test_on_a_real_server_a_stream_records_what_an_unstreamed_answer_does(sglang_server: Any):
    own = Tokenizer.load(str(sglang_server.model))
    sampling = Sampling(30, 1e-4, stop_token_ids=own.eos_token_ids, top_k=2)  # the likeliest token

    async def main() -> tuple[list[str], list[Trajectory]]:
        texts, items = [], []
        async with pool_on(sglang_server) as pool:
            await serve(pool, sglang_server.model, 3)
            for read in (None, stream_openai, stream_anthropic):
                recorded = on_pool(pool, own, sampling)
                async with served(recorded) as (url, key):
                    if read is not None:
                        texts.append("".join((await whole(read(url, key)))[0]))
                    else:
                        async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
                            done = await client.chat.completions.create(model="m", messages=HELLO)
                            texts.append(str(done.choices[0].message.content))
                items += recorded.trajectories(Prompt(0, []), 0, Reward(1.0))
        return texts, items

    texts, (whole_one, *streamed) = asyncio.run(main())
    assert len(streamed) == 2 and texts[1:] == [texts[0]] * 2
    assert all(same(whole_one, item) for item in streamed)
    assert set(whole_one.versions[whole_one.generated].tolist()) == {3}
