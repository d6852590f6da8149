"""Conversion of Anthropic's Messages to chat completions, and back (https://docs.anthropic.com/en/api/messages)."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, Field

from areal_like.capabilities.agents.continued_answers import merge_answers
from areal_like.capabilities.agents.ignored_fields import leave_out
from areal_like.capabilities.agents.image_parts import ImageBlock, content_of
from areal_like.capabilities.agents.openai_requests import (
    BLOCKS,
    JsonSchema,
    OtherFields,
    StopText,
    Text,
    Texts,
    check_fields,
)
from areal_like.capabilities.agents.replies import MODEL, Refused, error_content
from areal_like.capabilities.agents.session import Session
from areal_like.capabilities.agents.turn import Turn
from areal_like.core.types import FinishReason

type _Shown = Annotated[Text | ImageBlock, Field(discriminator="type")]


class _ToolUse(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(BaseModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[_Shown], BLOCKS] | None = None


type _Block = Annotated[Text | ImageBlock | _ToolUse | _ToolResult, Field(discriminator="type")]


class _AnthropicMessage(BaseModel):
    role: Literal["user", "assistant", "system"]  # Claude Code adds system messages in the middle of a conversation
    content: Annotated[list[_Block], BLOCKS]


class _AnthropicTool(BaseModel):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: JsonSchema


class _Typed(BaseModel):
    type: str


class _OutputConfig(BaseModel, extra="forbid"):
    effort: str | None = None


class _MessagesRequest(OtherFields):
    messages: list[_AnthropicMessage] = Field([])
    system: Texts | None = None
    tools: list[_AnthropicTool] | None = None
    tool_choice: _Typed | None = None
    stop_sequences: list[StopText] = Field([])
    thinking: _Typed | None = None
    output_config: _OutputConfig = _OutputConfig()
    max_tokens: Any = None


def as_chat_completion(fields: Mapping[str, Any], session: Session) -> dict[str, Any]:
    """Return the request's fields as a chat completion; raises Refused for fields without a counterpart."""
    asked = check_fields(_MessagesRequest, fields, session)
    if asked.thinking and asked.thinking.type != "disabled":
        why = "the chat template decides whether a model thinks"
        raise Refused(f"thinking: {why}; {leave_out('thinking')}", "thinking")
    chat = asked.get_shared()
    system = content_of(asked.system or [])
    chat["messages"] = [{"role": "system", "content": system}] if system else []
    chat["messages"] += merge_answers([own for message in asked.messages for own in _messages(message)])
    chat["continue_final_message"] = True
    if asked.tools:
        functions = [
            {"name": tool.name, "parameters": tool.input_schema}
            | ({} if tool.description is None else {"description": tool.description})
            for tool in asked.tools
        ]
        chat["tools"] = [{"type": "function", "function": function} for function in functions]
    if asked.tool_choice:
        chat["tool_choice"] = asked.tool_choice.type
    if asked.stop_sequences:
        chat["stop"] = asked.stop_sequences
    if asked.output_config.effort:
        chat["reasoning_effort"] = asked.output_config.effort
    return chat


class AnthropicMessage:
    """Answer to one request, number `number` of its session, with these fields; see Dialect."""

    def __init__(self, session: Session, fields: Mapping[str, Any], number: int) -> None:
        self._head = {
            "id": f"msg_{number}",
            "type": "message",
            "role": "assistant",
            "model": fields.get("model") or MODEL,
        }
        self._has_text = False  # a text block is open

    def whole(self, turn: Turn) -> dict[str, Any]:
        text = turn.text
        content = [{"type": "text", "text": text}] if text else []
        return {**self._head, "content": [*content, *_tool_uses(turn)], **_ending(turn), "usage": _usage(turn)}

    def start(self, prompt_tokens: int) -> bytes:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        empty: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return _events({"type": "message_start", "message": empty})

    def text(self, delta: str) -> bytes:
        begun = b"" if self._has_text else _block("start", 0, content_block={"type": "text", "text": ""})
        self._has_text = True
        return begun + _block("delta", 0, delta={"type": "text_delta", "text": delta})

    def finish(self, turn: Turn, rest: str) -> bytes:
        events = [self.text(rest)] if rest else []
        if self._has_text:
            events.append(_block("stop", 0))
        for index, use in enumerate(_tool_uses(turn), int(self._has_text)):
            given = orjson.dumps(use["input"]).decode()
            events += [
                _block("start", index, content_block={**use, "input": {}}),
                _block("delta", index, delta={"type": "input_json_delta", "partial_json": given}),
                _block("stop", index),
            ]
        end = {"type": "message_delta", "delta": _ending(turn), "usage": _usage(turn)}
        return b"".join(events) + _events(end, {"type": "message_stop"})

    def fail(self, message: str) -> bytes:
        return _events(error_content(500, message))


def _tool_uses(turn: Turn) -> list[dict[str, Any]]:
    uses = []
    for call in turn.messages[-1].get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        given = arguments if isinstance(arguments, dict) else {"arguments": arguments}
        uses.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given})
    return uses


def _ending(turn: Turn) -> dict[str, Any]:
    if turn.messages[-1].get("tool_calls"):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if turn.stopped_by is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": turn.stopped_by}
    cut = turn.response.finish_reason is FinishReason.LENGTH
    return {"stop_reason": "max_tokens" if cut else "end_turn", "stop_sequence": None}


def _usage(turn: Turn) -> dict[str, int]:
    return {"input_tokens": turn.prompt_tokens, "output_tokens": len(turn.response.tokens)}


def _block(event: str, index: int, **content: Any) -> bytes:
    return _events({"type": f"content_block_{event}", "index": index, **content})


def _events(*contents: Mapping[str, Any]) -> bytes:
    return b"".join(b"event: %s\ndata: %s\n\n" % (each["type"].encode(), orjson.dumps(each)) for each in contents)


def _messages(message: _AnthropicMessage) -> Iterator[dict[str, Any]]:
    """Yield an Anthropic message as one message, or as several if it has tool results."""
    blocks = message.content
    calls = [block for block in blocks if isinstance(block, _ToolUse)]
    results = [block for block in blocks if isinstance(block, _ToolResult)]
    shown = [block for block in blocks if isinstance(block, Text | ImageBlock)]
    for result in results:
        yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": content_of(result.content or [])}
    if calls or shown or not results:
        said: dict[str, Any] = {"role": message.role, "content": content_of(shown)}
        if calls:
            said["tool_calls"] = [_call(call) for call in calls]
        yield said


def _call(call: _ToolUse) -> dict[str, Any]:
    function = {"name": call.name, "arguments": orjson.dumps(call.input).decode()}
    return {"id": call.id, "type": "function", "function": function}
