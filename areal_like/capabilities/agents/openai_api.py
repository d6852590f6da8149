"""The APIs of episodes: requests of OpenAI's and Anthropic's clients whose answers can be trained on.

One function answers a request, however it arrives. Other requests are rejected with the name of the field.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import orjson

from areal_like.capabilities.agents import anthropic_api, responses_api
from areal_like.capabilities.agents.attempts import Sending, sending
from areal_like.capabilities.agents.conversation import MOST_LEVELS, as_sent, is_too_deep
from areal_like.capabilities.agents.ignored_fields import without_ignored, without_inert
from areal_like.capabilities.agents.openai_requests import read_request
from areal_like.capabilities.agents.replies import (
    MODEL,
    UNKNOWN_KEY,
    Refused,
    Reply,
    error_content,
    error_reply,
    json_reply,
)
from areal_like.capabilities.agents.session import Request, Session
from areal_like.capabilities.agents.streams import EVENT_STREAM, Dialect, Stream
from areal_like.capabilities.agents.turn import Turn
from areal_like.core.errors import RunError
from areal_like.core.types import FinishReason


class ChatCompletion:
    """Answer to one request, number `number` of its session, with these fields; see Dialect."""

    def __init__(self, session: Session, fields: Mapping[str, Any], number: int) -> None:
        self._session, self._fields = session, fields
        options = fields.get("stream_options")
        self._counts = isinstance(options, Mapping) and bool(options.get("include_usage"))
        self._head = {"id": f"chatcmpl-{number}", "created": int(time.time()), "model": fields.get("model") or MODEL}

    def whole(self, turn: Turn) -> dict[str, Any]:
        choice = self._choice(turn) | {"message": as_sent({**turn.messages[-1], "content": turn.text})}
        return {**self._head, "object": "chat.completion", "usage": _usage(turn), "choices": [choice]}

    def start(self, prompt_tokens: int) -> bytes:
        return self._delta({"role": "assistant", "content": ""})

    def text(self, delta: str) -> bytes:
        return self._delta({"content": delta})

    def finish(self, turn: Turn, rest: str) -> bytes:
        events = [self.text(rest)] if rest else []
        if calls := as_sent(turn.messages[-1]).get("tool_calls"):
            events.append(self._delta({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]}))
        events.append(self._chunk([self._choice(turn) | {"delta": {}}]))
        if self._counts:
            events.append(self._chunk([], usage=_usage(turn)))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def fail(self, message: str) -> bytes:
        return _event(error_content(500, message))

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return self._chunk([{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}])

    def _chunk(self, choices: Iterable[Mapping[str, Any]], **more: Any) -> bytes:
        return _event({**self._head, "object": "chat.completion.chunk", "choices": list(choices), **more})

    def _choice(self, turn: Turn) -> dict[str, Any]:
        cut = "length" if turn.response.finish_reason is FinishReason.LENGTH else "stop"
        return {
            "index": 0,
            "finish_reason": "tool_calls" if turn.messages[-1].get("tool_calls") else cut,
            "logprobs": _logprobs(self._session, turn) if self._fields.get("logprobs") else None,
        }


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


def _usage(turn: Turn) -> dict[str, int]:
    total, generated = len(turn.tokens), len(turn.response.tokens)
    return {"prompt_tokens": total - generated, "completion_tokens": generated, "total_tokens": total}


def _logprobs(session: Session, turn: Turn) -> dict[str, Any]:
    pairs = zip(turn.response.tokens.tolist(), turn.response.logprobs.tolist(), strict=True)
    content = [
        {"token": session.tokenizer.decode([token], special=True), "logprob": logprob, "top_logprobs": []}
        for token, logprob in pairs
    ]
    return {"content": content}


type Convert = Callable[[Mapping[str, Any], Session], Mapping[str, Any]]
"""From the fields of a request to the fields of a chat completion."""

type MakeAnswer = Callable[[Session, Mapping[str, Any], int], Dialect]
"""From the session, the fields of a request and its number to its answer."""


class OpenSessions:
    """The open episodes, each identified by an API key, which is valid until the episode ends."""

    def __init__(self) -> None:
        self._by_key: dict[str, Session] = {}

    @contextmanager
    def open(self, session: Session) -> Iterator[str]:
        """Yield the key of a session, valid while the body runs."""
        key = secrets.token_hex(16)
        self._by_key[key] = session
        try:
            yield key
        finally:
            self.close(key)

    def close(self, key: str) -> None:
        """Abort a session's pending requests and invalidate its key."""
        if (session := self._by_key.pop(key, None)) is not None:
            session.attempts.abort()

    def find(self, headers: Mapping[str, str]) -> Session | None:
        """Return the session whose key a request has."""
        scheme, _, token = headers.get("authorization", "").strip().partition(" ")
        keys = headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""
        return next((self._by_key[key] for key in keys if key in self._by_key), None)

    async def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """Answer one HTTP request once the answer is complete, even for a stream."""
        reply = await self.respond(method, path, headers, body)
        if isinstance(reply, Reply):
            return reply
        try:
            return Reply(200, b"".join([part async for part in reply.events()]), EVENT_STREAM)
        finally:
            reply.close()

    async def respond(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply | Stream:
        """Answer one HTTP request of an episode; a Stream has its first token, and the caller closes it.

        Raises nothing; the session stores a server's failure.
        """
        if (session := self.find(headers)) is None:
            return UNKNOWN_KEY
        try:
            return await _answer(session, method, path.rstrip("/"), body, sending(headers))
        except Refused as refusal:
            return error_reply(refusal.status, str(refusal), refusal.param, refusal.code)
        except RunError as failure:
            return error_reply(500, str(failure))


async def _answer(session: Session, method: str, path: str, body: bytes, sent: Sending) -> Reply | Stream:
    models = session.limits.models
    if method in ("GET", "HEAD") and path.endswith("/models"):
        return json_reply(200, _model_list(models))
    if method in ("GET", "HEAD") and "/models/" in path:
        name = path.partition("/models/")[2]
        _check_model(name, models)
        return json_reply(200, _model(name))
    if method == "POST" and (convert := _find(_COUNTS, path)):
        return _count(session, _fields(session, body), convert)
    if method == "POST" and (found := _find(_APIS, path)):
        return await _respond(session, _fields(session, body), sent, *found)
    served = ", ".join(f"/v1{end}" for end in (*_APIS, *_COUNTS))
    return error_reply(404, f"{method} {path} is not served: a run answers POST {served} and GET /v1/models")


def _find[T](served: Mapping[str, T], path: str) -> T | None:
    return next((found for end, found in served.items() if path.endswith(end)), None)


def _fields(session: Session, body: bytes) -> dict[str, Any]:
    fields = without_ignored(_object(body), session.limits.ignored_fields)
    _check_model(fields.get("model"), session.limits.models)
    return fields


def _read(session: Session, fields: Mapping[str, Any], convert: Convert) -> Request:
    return read_request(convert(without_inert(fields), session), session)


def _count(session: Session, fields: Mapping[str, Any], convert: Convert) -> Reply:
    """Return the number of tokens of the prompt that a request would have; it is not a turn."""
    tokens = session.count_prompt(_read(session, fields, convert))
    return json_reply(200, {"object": "response.input_tokens", "input_tokens": tokens})


async def _respond(
    session: Session, fields: Mapping[str, Any], sent: Sending, convert: Convert, make: MakeAnswer
) -> Reply | Stream:
    request = _read(session, fields, convert)
    is_streamed = bool(fields.get("stream"))
    attempt = session.begin(request, sent, streamed=is_streamed)
    api = make(session, fields, attempt.number)
    if not is_streamed:
        turn = await attempt.turn()
        return json_reply(200, api.whole(turn), turn)
    stream = Stream(session, attempt, request, api)
    with ExitStack() as unless_begun:
        unless_begun.callback(stream.close)
        await stream.begin()
        unless_begun.pop_all()
    return stream


def _check_model(name: Any, models: Sequence[str]) -> None:
    """Raise Refused for a model that the run does not serve; a request without a name means the policy."""
    if not name:
        return
    if not isinstance(name, str):
        raise Refused(f"model: {name!r} is not a name", "model", "invalid_value")
    if not any(name == model or fnmatchcase(name, model) for model in models):
        served = ", ".join(_names(models))
        raise Refused(
            f"The model `{name}` does not exist. The run serves its policy under these names: {served}. Send one of "
            "them, or add the name to `episode.models`.",
            "model",
            "model_not_found",
            404,
        )


def _names(models: Sequence[str]) -> list[str]:
    """Return the names without patterns."""
    return [name for name in models if "*" not in name] or [MODEL]


def _model(name: str) -> dict[str, Any]:
    """Return a model in the form of OpenAI and Anthropic."""
    own = {"id": name, "object": "model", "created": 0, "owned_by": "run"}
    return {**own, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _model_list(models: Sequence[str]) -> dict[str, Any]:
    names = _names(models)
    page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return {"object": "list", "data": [*map(_model, names)], **page}


def _pass_on(fields: Mapping[str, Any], _: Session) -> Mapping[str, Any]:
    return fields


_APIS: Mapping[str, tuple[Convert, MakeAnswer]] = {
    "/chat/completions": (_pass_on, ChatCompletion),
    "/messages": (anthropic_api.as_chat_completion, anthropic_api.AnthropicMessage),
    "/responses": (responses_api.as_chat_completion, responses_api.OpenAIResponse),
}

_COUNTS: Mapping[str, Convert] = {
    "/messages/count_tokens": anthropic_api.as_chat_completion,
    "/responses/input_tokens": responses_api.as_chat_completion,
}


def _object(body: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refused(f"the body is not JSON: {error}", None, "invalid_value") from error
    if not isinstance(fields, dict):
        raise Refused("the body is not an object", None, "invalid_value")
    if is_too_deep(fields):
        raise Refused(f"the body is nested more than {MOST_LEVELS} levels deep", None, "invalid_value")
    return fields
