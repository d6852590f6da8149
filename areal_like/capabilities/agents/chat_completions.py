"""OpenAI's chat completions of turns, whole or in chunks (https://platform.openai.com/docs/api-reference/chat)."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from areal_like.capabilities.agents.conversation import as_sent
from areal_like.capabilities.agents.replies import MODEL, error_content
from areal_like.capabilities.agents.session import Session
from areal_like.capabilities.agents.turn import Turn
from areal_like.types import FinishReason


class ChatCompletion:
    """Answer to one request, number `number` of its session, with these fields; also the Dialect of its chunks."""

    def __init__(self, session: Session, fields: Mapping[str, Any], number: int) -> None:
        self._session, self._fields = session, fields
        options = fields.get("stream_options")
        self._counts = isinstance(options, Mapping) and bool(options.get("include_usage"))
        self._head = {
            "id": f"chatcmpl-{number}",
            "created": int(time.time()),
            "model": fields.get("model") or MODEL,
        }

    def whole(self, turn: Turn) -> dict[str, Any]:
        """Return the completion of a turn."""
        choice = self._choice(turn) | {"message": as_sent({**turn.messages[-1], "content": turn.text})}
        return {**self._head, "object": "chat.completion", "usage": _usage(turn), "choices": [choice]}

    def start(self, prompt_tokens: int) -> bytes:
        """See Dialect."""
        return self._delta({"role": "assistant", "content": ""})

    def text(self, delta: str) -> bytes:
        """See Dialect."""
        return self._delta({"content": delta})

    def finish(self, turn: Turn, rest: str) -> bytes:
        """See Dialect."""
        events = [self.text(rest)] if rest else []
        if calls := as_sent(turn.messages[-1]).get("tool_calls"):
            events.append(self._delta({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]}))
        events.append(self._chunk([self._choice(turn) | {"delta": {}}]))
        if self._counts:
            events.append(self._chunk([], usage=_usage(turn)))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def fail(self, message: str) -> bytes:
        """See Dialect."""
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
