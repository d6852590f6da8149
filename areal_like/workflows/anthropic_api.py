"""Anthropic's Messages as chat completions, and back (https://docs.anthropic.com/en/api/messages)."""

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from areal_like.types import FinishReason
from areal_like.workflows.session import Refused, Turn

_SAME = ("model", "temperature", "top_p", "top_k", "max_tokens")
_OTHERS = {"messages", "system", "tools", "tool_choice", "stop_sequences", "stream", "metadata", "thinking"}


def as_chat_completion(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the same request as a chat completion; raises Refused for what has no counterpart."""
    for name in fields.keys() - {*_SAME, *_OTHERS}:
        raise Refused(f"{name} is not supported: leave it out", name, "unsupported_parameter")
    if (fields.get("thinking") or {}).get("type", "disabled") != "disabled":
        raise Refused("thinking: a model thinks as its chat template has it; leave it out", "thinking")
    chat = {name: fields[name] for name in _SAME if name in fields}
    system = "".join(_texts(fields.get("system") or "", "system"))
    chat["messages"] = [{"role": "system", "content": system}] if system else []
    for i, message in enumerate(fields.get("messages") or ()):
        chat["messages"] += _messages(message, f"messages[{i}]")
    if tools := fields.get("tools"):
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    if choice := fields.get("tool_choice"):
        chat["tool_choice"] = choice.get("type")
    if stop := fields.get("stop_sequences"):
        chat["stop"] = stop
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


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if "name" not in tool or "input_schema" not in tool:
        raise Refused(f"{where} is not a tool with a name and an input_schema", where)
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    if "description" in tool:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _messages(message: Any, where: str) -> Iterator[dict[str, Any]]:
    """One of Anthropic's messages as one message, or as several where it has results of tools."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
        raise Refused(f"{where} is not a message of the user or the assistant", where, "invalid_value")
    content = message.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    results = [block for block in blocks if block.get("type") == "tool_result"]
    calls = [block for block in blocks if block.get("type") == "tool_use"]
    for block in results:
        result = "".join(_texts(block.get("content") or "", f"{where}.content"))
        yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": result}
    others = [block for block in blocks if block not in results and block not in calls]
    if calls or others or not results:
        said: dict[str, Any] = {"role": message["role"], "content": "".join(_texts(others, f"{where}.content"))}
        if calls:
            said["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": orjson.dumps(call["input"]).decode()},
                }
                for call in calls
            ]
        yield said


def _texts(content: Any, where: str) -> Iterator[str]:
    for i, block in enumerate([{"type": "text", "text": content}] if isinstance(content, str) else content):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise Refused(f"{where}[{i}] is {block.get('type')}: the run generates from text alone", f"{where}[{i}]")
        yield block["text"]
