"""Anthropic's Messages as chat completions, and back (https://docs.anthropic.com/en/api/messages)."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from areal_like.types import FinishReason
from areal_like.workflows.session import Refused, Turn


class _Text(BaseModel):
    type: Literal["text"]
    text: str


# a text stands for one block of it
type _Texts = Annotated[list[_Text], BeforeValidator(lambda given: _blocks(given))]


class _ToolUse(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(BaseModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: _Texts | None = None


type _Block = Annotated[_Text | _ToolUse | _ToolResult, Field(discriminator="type")]


class _Message(BaseModel):
    role: Literal["user", "assistant"]
    content: Annotated[list[_Block], BeforeValidator(lambda given: _blocks(given))]


class _Tool(BaseModel):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class _Typed(BaseModel):
    type: str


class _Asked(BaseModel, extra="forbid"):
    """A request; fields that chat completions have too are only passed on."""

    messages: list[_Message] = []
    system: _Texts | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Typed | None = None
    stop_sequences: Any = None
    thinking: _Typed | None = None
    model: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    max_tokens: Any = None
    stream: Any = None
    metadata: Any = None


_SAME = ("model", "temperature", "top_p", "top_k", "max_tokens", "stream")


def as_chat_completion(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the same request as a chat completion; raises Refused for what has no counterpart."""
    try:
        asked = _Asked.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error) from error
    if asked.thinking and asked.thinking.type != "disabled":
        raise Refused("thinking: a model thinks as its chat template has it; leave it out", "thinking")
    chat = {name: fields[name] for name in _SAME if name in fields}
    system = _join(asked.system or [])
    chat["messages"] = [{"role": "system", "content": system}] if system else []
    chat["messages"] += [own for message in asked.messages for own in _messages(message)]
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
    return chat


def message_of(turn: Turn, identity: str, model: str) -> dict[str, Any]:
    """A turn as Anthropic's message."""
    said, total, generated = turn.messages[-1], len(turn.tokens), len(turn.response.tokens)
    content: list[dict[str, Any]] = [{"type": "text", "text": said["content"]}] if said["content"] else []
    for call in said.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        given = arguments if isinstance(arguments, dict) else {"arguments": arguments}
        content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given})
    cut = turn.response.finish_reason is FinishReason.LENGTH
    return {
        "id": identity,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": "tool_use" if said.get("tool_calls") else "max_tokens" if cut else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": total - generated, "output_tokens": generated},
    }


def events(message: Mapping[str, Any]) -> bytes:
    """A message as the stream of events that a client expects, each block in one piece."""
    return b"".join(b"event: %s\ndata: %s\n\n" % (e["type"].encode(), orjson.dumps(e)) for e in _events(message))


def _events(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"type": "message_start", "message": {**message, "content": [], "stop_reason": None}}
    for index, block in enumerate(message["content"]):
        is_text = block["type"] == "text"
        empty = {**block, "text": ""} if is_text else {**block, "input": {}}
        delta = (
            {"type": "text_delta", "text": block["text"]}
            if is_text
            else {"type": "input_json_delta", "partial_json": orjson.dumps(block["input"]).decode()}
        )
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    stop = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": stop, "usage": message["usage"]}
    yield {"type": "message_stop"}


def _blocks(given: Any) -> Any:
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


def _messages(message: _Message) -> Iterator[dict[str, Any]]:
    """One of Anthropic's messages as one message, or as several where it has results of tools."""
    blocks = message.content
    calls = [block for block in blocks if isinstance(block, _ToolUse)]
    results = [block for block in blocks if isinstance(block, _ToolResult)]
    texts = [block for block in blocks if isinstance(block, _Text)]
    for result in results:
        yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": _join(result.content or [])}
    if calls or texts or not results:
        said: dict[str, Any] = {"role": message.role, "content": _join(texts)}
        if calls:
            said["tool_calls"] = [_call(call) for call in calls]
        yield said


def _call(call: _ToolUse) -> dict[str, Any]:
    function = {"name": call.name, "arguments": orjson.dumps(call.input).decode()}
    return {"id": call.id, "type": "function", "function": function}


def _join(texts: list[_Text]) -> str:
    return "".join(block.text for block in texts)


def _refusal(error: ValidationError) -> Refused:
    """The first of the problems, with the place that it is at."""
    problem = error.errors(include_url=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).removeprefix(".")
    if problem["type"] == "extra_forbidden":
        return Refused(f"{where} is not supported: leave it out", where, "unsupported_parameter")
    if problem["type"] == "union_tag_invalid":
        return Refused(f"{where} is {problem['ctx']['tag']}: the run generates from text alone", where)
    return Refused(f"{where}: {problem['msg']}", where, "invalid_value")
