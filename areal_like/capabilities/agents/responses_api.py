"""OpenAI's Responses as chat completions, and back (https://platform.openai.com/docs/api-reference/responses)."""

import re
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, Field

from areal_like.capabilities.agents.conversation import as_sent
from areal_like.capabilities.agents.ignored_fields import DEFAULTS, check_default
from areal_like.capabilities.agents.image_parts import InputImage, content_of
from areal_like.capabilities.agents.openai_requests import BLOCKS, Count, Defined, OtherFields, check_fields
from areal_like.capabilities.agents.replies import MODEL, Refused
from areal_like.capabilities.agents.session import Session
from areal_like.capabilities.agents.turn import Turn
from areal_like.core.types import FinishReason

_ANSWER = re.compile(r"resp_(\d+)(i?)")  # the number of the request; `i` if its first message is its instructions
_ITEM = re.compile(r"(?:msg|fc)_(\d+)(?:_\d+)?")


class _Text(BaseModel):
    type: Literal["input_text", "output_text", "text"]
    text: str


type _Part = Annotated[_Text | InputImage, Field(discriminator="type")]
type _Parts = Annotated[list[_Part], BLOCKS]


class _MessageItem(BaseModel):
    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: _Parts
    id: str | None = None


class _CallItem(BaseModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None


class _OutputItem(BaseModel):
    type: Literal["function_call_output"]
    call_id: str
    output: _Parts


type _Item = Annotated[_MessageItem | _CallItem | _OutputItem, Field(discriminator="type")]


def _as_items(given: Any) -> Any:
    """Return an input as a list of items; a message need not name its type."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list):
        return given
    return [{"type": "message", **item} if isinstance(item, dict) and "role" in item else item for item in given]


class _FunctionTool(Defined):
    type: Literal["function"]


class _Reasoning(BaseModel, extra="forbid"):
    """The effort of thinking. Its summary is ignored, because the text of the answer contains the thinking."""

    effort: str | None = None
    summary: Any = None
    generate_summary: Any = None


class _TextOptions(BaseModel, extra="forbid"):
    format: dict[str, Any] | None = None


class _ResponsesRequest(OtherFields):
    input: Annotated[list[_Item], BeforeValidator(_as_items)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[_FunctionTool] | None = None
    max_output_tokens: Count = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # there is no such content
    text: _TextOptions = _TextOptions()
    reasoning: _Reasoning = _Reasoning()
    stream_options: Any = None
    tool_choice: Any = None
    stop: Any = None


def as_chat_completion(fields: Mapping[str, Any], session: Session) -> dict[str, Any]:
    """Return the request's fields as a chat completion; raises Refused for fields without a counterpart."""
    asked = check_fields(_ResponsesRequest, fields, session)
    check_default("text.format", asked.text.format, *DEFAULTS["response_format"])
    chat = asked.get_shared()
    chat["messages"] = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    if asked.previous_response_id is not None:
        chat["messages"] += _earlier(asked.previous_response_id, session)
    chat["messages"] += _messages(asked.input)
    if asked.max_output_tokens:
        chat["max_completion_tokens"] = asked.max_output_tokens
    if asked.tools:
        chat["tools"] = [_tool(tool) for tool in asked.tools]
    if asked.reasoning.effort:
        chat["reasoning_effort"] = asked.reasoning.effort
    return chat


class OpenAIResponse:
    """Answer to one request, number `number` of its session, with these fields; see Dialect."""

    def __init__(self, session: Session, fields: Mapping[str, Any], number: int) -> None:
        self._number, self._events = number, 0
        own = {name: fields.get(name) for name in ("temperature", "top_p")}
        self._head: dict[str, Any] = {
            "id": f"resp_{number}" + ("i" if fields.get("instructions") else ""),
            "object": "response",
            "created_at": int(time.time()),
            "model": fields.get("model") or MODEL,
            "instructions": fields.get("instructions"),
            "previous_response_id": fields.get("previous_response_id"),
            "max_output_tokens": fields.get("max_output_tokens"),
            "tools": [{"strict": False, "parameters": None, **tool} for tool in fields.get("tools") or ()],
            "tool_choice": fields.get("tool_choice") or "auto",
            "parallel_tool_calls": True,
            "metadata": fields.get("metadata") or {},
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            **{name: getattr(session.sampling, name) if value is None else value for name, value in own.items()},
        }
        self._shown: list[str] | None = None  # the text of the started message

    def whole(self, turn: Turn) -> dict[str, Any]:
        cut = turn.response.finish_reason is FinishReason.LENGTH
        output = self._output(turn, "incomplete" if cut else "completed")
        return self._response("incomplete" if cut else "completed", output, _usage(turn))

    def start(self, prompt_tokens: int) -> bytes:
        empty = self._response("in_progress", [])
        return self._event("response.created", response=empty) + self._event("response.in_progress", response=empty)

    def text(self, delta: str) -> bytes:
        begun = b""
        if self._shown is None:
            self._shown = []
            begun = self._event("response.output_item.added", output_index=0, item=self._message("in_progress"))
            begun += self._event("response.content_part.added", **self._place(), part=_part(""))
        self._shown.append(delta)
        return begun + self._event("response.output_text.delta", **self._place(), delta=delta, logprobs=[])

    def finish(self, turn: Turn, rest: str) -> bytes:
        whole = self.whole(turn)
        events = [self.text(rest)] if rest or (self._shown is None and whole["output"][0]["type"] == "message") else []
        calls = [item for item in whole["output"] if item["type"] == "function_call"]
        if self._shown is not None:
            events.append(self._end_message("".join(self._shown)))
        for index, call in enumerate(calls, 0 if self._shown is None else 1):
            events.append(self._call(index, call))
        events.append(self._event(f"response.{whole['status']}", response=whole))
        return b"".join(events)

    def fail(self, message: str) -> bytes:
        failed = self._response("failed", [], error={"code": "server_error", "message": message})
        error = self._event("error", code="server_error", message=message, param=None)
        return error + self._event("response.failed", response=failed)

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: Any = None, error: Any = None
    ) -> dict[str, Any]:
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        ended = {"status": status, "incomplete_details": details, "error": error, "usage": usage}
        return {**self._head, **ended, "output": output}

    def _output(self, turn: Turn, status: str) -> list[dict[str, Any]]:
        """Return the items of a turn: its text, unless there are only calls, and its calls."""
        message = as_sent(turn.messages[-1])
        calls = message.get("tool_calls") or ()
        texts = [message["content"]] if message["content"] or not calls else []
        made = [
            {
                "type": "function_call",
                "id": f"fc_{self._number}_{index}",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
            for index, call in enumerate(calls)
        ]
        return [*(self._message(status, text) for text in texts), *made]

    def _message(self, status: str, text: str | None = None) -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        head = {"type": "message", "id": f"msg_{self._number}", "role": "assistant"}
        return {**head, "status": status, "content": content}

    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self._number}", "output_index": 0, "content_index": 0}

    def _end_message(self, text: str) -> bytes:
        return (
            self._event("response.output_text.done", **self._place(), text=text, logprobs=[])
            + self._event("response.content_part.done", **self._place(), part=_part(text))
            + self._event("response.output_item.done", output_index=0, item=self._message("completed", text))
        )

    def _call(self, index: int, call: Mapping[str, Any]) -> bytes:
        begun = {**call, "arguments": "", "status": "in_progress"}
        place = {"item_id": call["id"], "output_index": index}
        arguments, name = call["arguments"], call["name"]
        return (
            self._event("response.output_item.added", output_index=index, item=begun)
            + self._event("response.function_call_arguments.delta", **place, delta=arguments)
            + self._event("response.function_call_arguments.done", **place, name=name, arguments=arguments)
            + self._event("response.output_item.done", output_index=index, item=call)
        )

    def _event(self, kind: str, **content: Any) -> bytes:
        content = {"type": kind, "sequence_number": self._events, **content}
        self._events += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps(content))


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(turn: Turn) -> dict[str, Any]:
    total, generated = len(turn.tokens), len(turn.response.tokens)
    return {
        "input_tokens": total - generated,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": total,
    }


def _tool(tool: _FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _earlier(name: str, session: Session) -> list[Mapping[str, Any]]:
    """Return the conversation up to an answer of the episode, without instructions, which each request sets anew."""
    found = _ANSWER.fullmatch(name)
    turn = session.attempts.answer(int(found[1])) if found else None
    if found is None or turn is None:
        problem = f"previous_response_id: the episode has no complete response {name!r}"
        raise Refused(problem, "previous_response_id", "previous_response_not_found")
    return [as_sent(message) for message in turn.messages[1 if found[2] else 0 :]]


def _messages(items: list[_Item]) -> list[dict[str, Any]]:
    """Return the messages of items; the text and the calls of one answer are one message."""
    messages: list[dict[str, Any]] = []
    answer: str | None = None  # the number of the assistant's last message
    for item in items:
        own = _number(item)
        if isinstance(item, _CallItem):
            follows = bool(messages) and messages[-1]["role"] == "assistant"
            if not follows or (answer and own and answer != own):
                messages.append({"role": "assistant", "content": ""})
                answer = own
            messages[-1].setdefault("tool_calls", []).append(_as_call(item))
        elif isinstance(item, _OutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content_of(item.output)})
        else:
            messages.append({"role": item.role, "content": content_of(item.content)})
            answer = own
    return messages


def _number(item: _Item) -> str | None:
    """Return the number of an item's answer, if the item's id contains one."""
    found = None if isinstance(item, _OutputItem) else _ITEM.fullmatch(item.id or "")
    return found[1] if found else None


def _as_call(call: _CallItem) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
