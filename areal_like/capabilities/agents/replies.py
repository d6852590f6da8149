"""HTTP responses to the requests of agents, and refusals."""

from dataclasses import dataclass
from typing import Any

import orjson

from areal_like.capabilities.agents.turn import Turn

MODEL = "policy"  # the model's name for clients that do not set one
# Anthropic's error types, which its clients use for errors in streams; OpenAI's clients read status and code.
_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class Refused(Exception):
    """A request that cannot be answered: `param` is the field, `code` is for programs, `status` is HTTP's."""

    def __init__(
        self, message: str, param: str | None = None, code: str = "unsupported_value", status: int = 400
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True)
class Reply:
    """An HTTP response, and the turn that it answers, if any."""

    status: int
    content: bytes
    content_type: str = "application/json"
    turn: Turn | None = None


def json_reply(status: int, content: dict[str, Any], turn: Turn | None = None) -> Reply:
    """Return a JSON response, possibly the answer of a turn."""
    return Reply(status, orjson.dumps(content), turn=turn)


def error_reply(status: int, message: str, param: str | None = None, code: str | None = None) -> Reply:
    """Return an error in the form of OpenAI and Anthropic."""
    return json_reply(status, error_content(status, message, param, code))


def error_content(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the JSON of an error."""
    kind = _KINDS.get(status, "invalid_request_error") if status < 500 else "server_error"
    return {"type": "error", "error": {"message": message, "type": kind, "param": param, "code": code}}


UNKNOWN_KEY = error_reply(401, "the API key does not belong to a running episode")
