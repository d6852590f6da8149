"""OpenAI's chat completions, as far as their answers can be trained on; everything else is refused by name.

One function answers a request, whichever way it came (https://platform.openai.com/docs/api-reference/chat/create), and
Anthropic's Messages as well, by way of `anthropic_api.py`.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import orjson

from areal_like.errors import RunError
from areal_like.types import FinishReason
from areal_like.workflows.anthropic_api import as_chat_completion, events, message_of
from areal_like.workflows.attempts import ONCE, Sending, sending
from areal_like.workflows.conversation import Context, Message, parsed_arguments
from areal_like.workflows.session import Refused, Request, Session, Turn

MODEL = "policy"
_EVENTS = "text/event-stream"
_ROLES = ("system", "developer", "user", "assistant", "tool")
# fields that change nothing in the answer
_WITHOUT_EFFECT = {"model", "user", "metadata", "store", "service_tier", "stream_options", "safety_identifier"}


@dataclass(frozen=True)
class Reply:
    """An HTTP response, and the turn that it has the answer of."""

    status: int
    content: bytes
    content_type: str = "application/json"
    turn: Turn | None = None

    def delivered(self, is_sent: bool) -> None:
        """Note whether a client was there when this was sent; one of several that wait for a turn is enough."""
        if self.turn is not None:
            self.turn.delivered = is_sent or bool(self.turn.delivered)


class OpenSessions:
    """The episodes that requests may come from, each known by an API key of its own, which ends with it."""

    def __init__(self) -> None:
        self._by_key: dict[str, Session] = {}

    @contextmanager
    def open(self, session: Session) -> Iterator[str]:
        """The key of a session, good while the body runs."""
        key = secrets.token_hex(16)
        self._by_key[key] = session
        try:
            yield key
        finally:
            self.close(key)

    def close(self, key: str) -> None:
        """End what a session still waits for; its key is not good any more."""
        if (session := self._by_key.pop(key, None)) is not None:
            session.attempts.abort()

    def find(self, headers: Mapping[str, str]) -> Session | None:
        """The session whose key a request has."""
        return self._by_key.get(headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer "))

    async def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """Answer one HTTP request; see `answer`."""
        if (session := self.find(headers)) is None:
            return UNKNOWN_KEY
        return await answer(session, method, path, body, sending(headers))


async def answer(session: Session, method: str, path: str, body: bytes, sent: Sending = ONCE) -> Reply:
    """Answer one HTTP request of an episode; raises nothing: the session keeps what a server fails of."""
    try:
        if method == "GET" and path.endswith("/models"):
            return _json(200, {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "run"}]})
        if method == "POST" and path.endswith("/chat/completions"):
            fields = _object(body)
            turn = await session.complete(read_request(fields, session), sent)
            return replace(_reply(session, turn, fields), turn=turn)
        if method == "POST" and path.endswith("/messages"):
            fields = _object(body)
            turn = await session.complete(read_request(as_chat_completion(fields), session), sent)
            message = message_of(turn, f"msg_{session.turns.index(turn)}", fields.get("model") or MODEL)
            reply = Reply(200, events(message), _EVENTS) if fields.get("stream") else _json(200, message)
            return replace(reply, turn=turn)
        return failed(404, f"{method} {path} is not served: a run answers POST /v1/chat/completions and /v1/messages")
    except Refused as refusal:
        return failed(400, str(refusal), refusal.param, refusal.code)
    except RunError as failure:
        return failed(500, str(failure))


def read_request(fields: Mapping[str, Any], session: Session) -> Request:
    """The request that a body describes; raises Refused for what cannot be trained on or is not understood."""
    for name, value in fields.items():
        if value is None or name in _WITHOUT_EFFECT:
            continue
        if name not in _FIELDS:
            raise Refused(f"{name} is not supported: leave it out", name, "unsupported_parameter")
        if (problem := _FIELDS[name](value, session)) is not None:
            raise Refused(f"{name}: {problem}", name)
    stop = fields.get("stop") or ()
    most = fields.get("max_completion_tokens") or fields.get("max_tokens")
    tools = None if fields.get("tool_choice") == "none" else fields.get("tools") or None
    if not fields.get("messages"):
        raise Refused("messages: a conversation needs at least one message", "messages", "invalid_value")
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(fields["messages"])]
    context = Context(tools, fields.get("chat_template_kwargs") or {})
    return Request(messages, context, most, (stop,) if isinstance(stop, str) else tuple(stop))


def _only(wanted: Any, why: str) -> Callable[[Any, Session], str | None]:
    """A field that may have one value alone."""
    return lambda value, _: None if value == wanted else f"{value!r} cannot be trained on: {why}; leave it out"


def _is(kind: type, words: str) -> Callable[[Any, Session], str | None]:
    return lambda value, _: None if isinstance(value, kind) else f"{value!r} is not {words}"


def _temperature(value: Any, session: Session) -> str | None:
    own = session.sampling.temperature
    if not session.trained or value == own:
        return None
    return f"{value!r} is not the run's {own:g} (gconfig.temperature), which the log-probs depend on; leave it out"


def _count(value: Any, _: Session) -> str | None:
    return None if type(value) is int and value > 0 else f"{value!r} is not a number of tokens"


def _stop(value: Any, _: Session) -> str | None:
    texts = [value] if isinstance(value, str) else value
    fine = isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)
    return None if fine else f"{value!r} is neither a text nor a list of texts"


def _tools(value: Any, session: Session) -> str | None:
    if not isinstance(value, list):
        return "it is not a list"
    for i, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return f"[{i}] is not a function tool with a name"
    if value and session.parse_tools is None:
        return "set episode.tool_call_parser to SGLang's name for the model family, such as qwen25"
    return None


def _tool_choice(value: Any, _: Session) -> str | None:
    if value in ("auto", "none"):
        return None
    return f"{value!r} constrains what is sampled, which cannot be trained on; write auto or none"


def _template_arguments(value: Any, _: Session) -> str | None:
    if not isinstance(value, dict):
        return f"{value!r} is not an object"
    own = [name for name in value if name in _OF_THE_REQUEST]
    return f"{own[0]} is not the template's to be given: it follows from the request" if own else None


_OF_THE_REQUEST = frozenset(
    [
        "self",
        "messages",
        "conversations",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
    ]
)
_ONE_MESSAGE = "one request is one message of the conversation: send several requests"
_SHIFTED = "tokens would be drawn from another distribution than the log-probs are of"
_FIELDS: Mapping[str, Callable[[Any, Session], str | None]] = {
    "messages": _is(list, "a list"),
    "max_tokens": _count,
    "max_completion_tokens": _count,
    "temperature": _temperature,
    "top_p": _only(1, _SHIFTED),
    "top_k": _only(-1, _SHIFTED),
    "min_p": _only(0, _SHIFTED),
    "frequency_penalty": _only(0, _SHIFTED),
    "presence_penalty": _only(0, _SHIFTED),
    "repetition_penalty": _only(1, _SHIFTED),
    "logit_bias": _only({}, _SHIFTED),
    "response_format": _only({"type": "text"}, _SHIFTED),
    "n": _only(1, _ONE_MESSAGE),
    "top_logprobs": _only(0, "the servers keep the log-prob of the sampled token alone"),
    "modalities": _only(["text"], "the run generates text"),
    "parallel_tool_calls": _only(True, "the number of tool calls would be constrained"),
    "stop": _stop,
    "tools": _tools,
    "tool_choice": _tool_choice,
    "logprobs": _is(bool, "true or false"),
    "stream": _is(bool, "true or false"),
    "chat_template_kwargs": _template_arguments,
}


def _message(message: Any, where: str) -> Message:
    """A message as chat templates take it; raises Refused."""
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise Refused(f"{where} is not a message with a role of {', '.join(_ROLES)}", where, "invalid_value")
    kept = {name: value for name, value in message.items() if value is not None}
    kept["role"] = "system" if message["role"] == "developer" else message["role"]
    kept["content"] = "".join(_texts(message.get("content"), f"{where}.content"))
    calls = kept.get("tool_calls") or []
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        raise Refused(f"{where}.tool_calls is not a list of function calls", where, "invalid_value")
    if "tool_calls" in kept:
        kept["tool_calls"] = [{**call, "function": _call(call["function"], where)} for call in calls]
    return kept


def _call(function: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A tool call with its arguments as an object, as templates want them; a text that is not JSON stays one."""
    name, arguments = function.get("name"), function.get("arguments", "{}")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise Refused(f"{where}.tool_calls has a function without a name, or whose arguments are no text", where)
    return {"name": name, "arguments": parsed_arguments(arguments)}


def _as_openai_has_it(message: Message) -> dict[str, Any]:
    """A message with the arguments of its tool calls as text."""
    calls = [
        {**call, "function": {"name": call["function"]["name"], "arguments": _text_of(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, **({"tool_calls": calls} if calls else {})}


def _text_of(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()


def _texts(content: Any, where: str) -> Iterator[str]:
    if content is None or isinstance(content, str):
        yield content or ""
        return
    for i, part in enumerate(content if isinstance(content, list) else [content]):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise Refused(f"{where}[{i}] is {kind}: the run generates from text alone", f"{where}[{i}]")
        yield str(part.get("text") or "")


def _reply(session: Session, turn: Turn, fields: Mapping[str, Any]) -> Reply:
    message, response = _as_openai_has_it(turn.messages[-1]), turn.response
    finished = "length" if response.finish_reason is FinishReason.LENGTH else "stop"
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": "tool_calls" if "tool_calls" in message else finished,
        "logprobs": _logprobs(session, turn) if fields.get("logprobs") else None,
    }
    total, generated = len(turn.tokens), len(response.tokens)
    whole = {
        "id": f"chatcmpl-{session.turns.index(turn)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": fields.get("model") or MODEL,
        "usage": {"prompt_tokens": total - generated, "completion_tokens": generated, "total_tokens": total},
    }
    if not fields.get("stream"):
        return _json(200, whole | {"choices": [choice | {"message": message}]})
    delta = message
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    chunk = whole | {"object": "chat.completion.chunk", "choices": [choice | {"delta": delta}]}
    return Reply(200, b"data: " + orjson.dumps(chunk) + b"\n\ndata: [DONE]\n\n", _EVENTS)


def _logprobs(session: Session, turn: Turn) -> dict[str, Any]:
    pairs = zip(turn.response.tokens.tolist(), turn.response.logprobs.tolist(), strict=True)
    content = [
        {"token": session.tokenizer.decode([token], special=True), "logprob": logprob, "top_logprobs": []}
        for token, logprob in pairs
    ]
    return {"content": content}


def _object(body: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refused(f"the body is not JSON: {error}", None, "invalid_value") from error
    if not isinstance(fields, dict):
        raise Refused("the body is not an object", None, "invalid_value")
    return fields


def _json(status: int, content: dict[str, Any]) -> Reply:
    return Reply(status, orjson.dumps(content))


def failed(status: int, message: str, param: str | None = None, code: str | None = None) -> Reply:
    """An error, as OpenAI and Anthropic write it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _json(status, {"type": "error", "error": {"message": message, "type": kind, "param": param, "code": code}})


UNKNOWN_KEY = failed(401, "the API key is that of no episode: it is over, or never was")
