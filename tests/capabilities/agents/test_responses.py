"""OpenAI's Responses: the same turns, token for token, as chat completions of the same conversation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from limits import HUNG_S
from scripted import END, says, session

from areal_like.capabilities.agents.endpoint import Endpoint
from areal_like.capabilities.agents.openai_api import OpenSessions
from areal_like.capabilities.agents.schema import EpisodeConfig
from areal_like.capabilities.agents.session import Session
from areal_like.core.types import Prompt, Reward, Trajectory

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: Any = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True, "description": "adds"}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}


async def parse(text: str, tools: Any) -> Any:
    """A call for each `+`; the text before the first is what is left."""
    left, *calls = text.split("+")
    return left, [("add", {"a": number}) for number, _ in enumerate(calls)]


@contextmanager
def client_of(recorded: Session) -> Iterator[openai.OpenAI]:
    sessions = OpenSessions()
    with (
        Endpoint(sessions, EpisodeConfig()) as endpoint,
        sessions.open(recorded) as key,
        httpx.Client(trust_env=False, timeout=HUNG_S) as http,
    ):
        yield openai.OpenAI(base_url=endpoint.base_url, api_key=key, max_retries=0, http_client=http)


def trained(recorded: Session) -> list[Trajectory]:
    return recorded.trajectories(Prompt(0, []), 0, Reward(1.0))


def test_a_text_is_the_prompt_of_a_chat_completion():
    (own, model), (other, chat) = session("plain", says("ab")), session("plain", says("ab"))
    with client_of(own) as client, client_of(other) as second:
        answer = client.responses.create(
            model="policy", instructions="th", input="x", temperature=0.5, max_output_tokens=7
        )
        messages: Any = [{"role": "system", "content": "th"}, {"role": "user", "content": "x"}]
        second.chat.completions.create(model="policy", messages=messages, temperature=0.5, max_tokens=7)
    assert model.asked == chat.asked and own.turns[0].messages == other.turns[0].messages
    assert (answer.output_text, answer.status, answer.object) == ("ab", "completed", "response")
    usage: Any = answer.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(model.asked[0]), len(model.answered[0].tokens))


@pytest.mark.parametrize("by", ["items", "id", "texts"])
def test_a_conversation_with_tools_is_one_trajectory(by):
    (own, model), (other, chat) = (
        session("strips_thinking", says("th+1+", "3", "ab"), parse_tools=parse) for _ in range(2)
    )
    items: list[Any] = [{"role": "user", "content": "x"}]
    more: dict[str, Any] = {}
    with client_of(own) as client:
        for new in (None, {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "y"}]}, None):
            answer = client.responses.create(model="policy", instructions="go", input=items, tools=[TOOL], **more)
            given = [item.to_dict() for item in answer.output]
            if by == "texts":  # frameworks may leave out ids and states
                given = [{key: item[key] for key in item if key not in ("id", "status")} for item in given]
            results = [
                {"type": "function_call_output", "call_id": item["call_id"], "output": "3"}
                for item in given
                if item["type"] == "function_call"
            ]
            added = [*results, *([new] if new else [])]
            items, more = (added, {"previous_response_id": answer.id}) if by == "id" else ([*items, *given, *added], {})
    with client_of(other) as client:
        messages: list[Any] = [{"role": "system", "content": "go"}, {"role": "user", "content": "x"}]
        for new in (None, {"role": "user", "content": "y"}, None):
            made = (
                client.chat.completions.create(model="policy", messages=messages, tools=[CHAT_TOOL]).choices[0].message
            )
            calls = made.tool_calls or []
            results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in calls]
            messages += [made.to_dict(), *results, *([new] if new else [])]
    assert model.asked == chat.asked and len(model.asked) == 3
    assert [turn.continuity for turn in own.turns] == [turn.continuity for turn in other.turns]
    (item,) = trained(own)
    assert own.tokenizer.decode(item.tokens[item.generated].tolist(), special=True) == f"th+1+{END}3{END}ab{END}"


def test_an_answer_that_nothing_follows_is_not_answered_again():
    own, model = session("plain", says("ab"), parse_tools=parse)
    items: list[Any] = [{"role": "user", "content": "x"}]
    with client_of(own) as client:
        answer = client.responses.create(model="policy", input=items, tools=[TOOL])
        items += [item.to_dict() for item in answer.output]
        with pytest.raises(openai.BadRequestError, match="the last message is the assistant's"):
            client.responses.create(model="policy", input=items, tools=[TOOL])
    assert len(model.asked) == 1


def test_a_stream_has_the_events_of_the_response():
    own, _ = session("plain", says("th 1+", "ab"), parse_tools=parse)
    with client_of(own) as client:
        with client.responses.stream(model="policy", input="x", tools=[TOOL]) as stream:
            events = list(stream)
            final = stream.get_final_response()
        whole = client.responses.create(model="policy", input="x", tools=[TOOL], previous_response_id=final.id)
    kinds = [event.type for event in events]
    assert kinds[:5] == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        "response.output_text.delta",
    ]
    assert [kind for kind in kinds[4:] if kind != "response.output_text.delta"] == [
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        *("response.output_item.added", "response.function_call_arguments.delta"),
        *("response.function_call_arguments.done", "response.output_item.done", "response.completed"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "th 1"
    assert final.output_text == "th 1" and [item.type for item in final.output] == ["message", "function_call"]
    assert json.loads(final.output[1].arguments) == {"a": 0}  # type: ignore[union-attr]
    assert whole.output_text == "ab" and len(trained(own)) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_text_and_one_that_was_cut_are_responses(stream):
    own, _ = session("plain", lambda n: [own.tokenizer.eos_token_ids[0]] if n == 0 else [*b"abcabc"])
    with client_of(own) as client:
        answers = [client.responses.create(model="policy", input="x", max_output_tokens=3, stream=stream) for _ in "ab"]
        if stream:
            answers = [list(answer)[-1].response for answer in answers]  # type: ignore[arg-type, union-attr]
    empty, cut = answers
    assert (empty.output_text, empty.status, len(empty.output)) == ("", "completed", 1)
    assert (cut.status, cut.incomplete_details.reason, cut.usage.output_tokens) == (
        *("incomplete", "max_output_tokens"),
        3,
    )


REFUSED = [
    ({"input": 7}, r"input"),
    ({"input": []}, r"messages"),
    ({"input": [{"role": "robot", "content": "x"}]}, r"input\[0\].*role"),
    ({"input": [{"role": "user", "content": 7}]}, r"input\[0\].*content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, r"input\[0\].*content\[0\]"),
    ({"input": [{"type": "reasoning", "summary": []}]}, r"input\[0\] is reasoning"),
    ({"input": [{"type": "function_call", "name": "add"}]}, r"call_id: Field required"),
    ({"tools": [{"type": "web_search"}]}, r"tools\[0\]"),
    ({"tools": [{**TOOL, "parameters": {"type": "money"}}]}, "the arguments of a tool are an object"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"max_output_tokens": "many"}, "max_output_tokens"),
    ({"reasoning": {"effort": "low", "mode": "x"}}, r"reasoning\.mode is not supported"),
    ({"text": {"format": {"type": "json_schema"}}}, "response_format|text"),
    ({"text": {"verbosity": "low"}}, r"text\.verbosity is not supported"),
    ({"conversation": "x"}, "conversation is not supported"),
    ({"truncation": "auto"}, "truncation"),
    ({"previous_response_id": "resp_0"}, "no complete response 'resp_0'"),
    ({"previous_response_id": "x" * 99}, "no complete response"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=lambda each: str(each)[:40])
def test_what_cannot_be_served_is_refused_by_name(changes, words):
    own, model = session("plain", says("ab"), parse_tools=parse)
    with client_of(own) as client:
        with pytest.raises(openai.BadRequestError, match=words):
            client.post("/responses", body={"model": "policy", "input": "x", **changes}, cast_to=object)
        assert model.asked == []
        assert client.responses.create(model="policy", input="x").output_text == "ab"


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_of_openais_sdk_is_recorded(stream):
    """`openai-agents` needs a later client of OpenAI than the engine's: this runs where it is installed."""
    agents = pytest.importorskip("agents")
    own, _ = session("strips_thinking", says("th+1", "3"), parse_tools=parse)

    @agents.function_tool
    def add(a: int) -> int:
        """Add."""
        return a + 3

    async def play() -> Any:
        sessions = OpenSessions()
        with Endpoint(sessions, EpisodeConfig()) as endpoint, sessions.open(own) as key:
            client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=key, max_retries=0)
            model = agents.OpenAIResponsesModel(model="policy", openai_client=client)
            agent = agents.Agent(name="a", instructions="go", tools=[add], model=model)
            if not stream:
                return await agents.Runner.run(agent, "x")
            result = agents.Runner.run_streamed(agent, "x")
            assert "raw_response_event" in [event.type async for event in result.stream_events()]
            return result

    agents.set_tracing_disabled(True)
    result = asyncio.run(play())
    assert result.final_output == "3"
    (item,) = trained(own)
    assert own.tokenizer.decode(item.tokens[item.generated].tolist(), special=True) == f"th+1{END}3{END}"
