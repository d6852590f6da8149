"""The events that SGLang 0.5.17 streams as an answer to `/generate`, typed: a field of another type is an error.

Decoding takes most of the time of reading answers, so only used fields are decoded, and nothing twice.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import numpy as np

from areal_like.backends.http import fault_of, may_pass
from areal_like.backends.sglang.labels import COLUMNS, LABELS, WrongLabels, read_columns, token_versions
from areal_like.backends.sglang.served import fields_of
from areal_like.core.columns import Column, served_columns
from areal_like.core.errors import ServerError
from areal_like.core.rollout.http import Unavailable
from areal_like.core.rollout.sample import refuse_field
from areal_like.core.rollout.server import OF_ALL, Part
from areal_like.core.types import FinishReason, Piece


def part_of(event: bytes, server: str) -> Part:
    """Return the content of an event, or an error at the place OF_ALL if it does not concern one input."""
    try:
        news = _decoder(tuple(served_columns().values()))(event)
        if news.error is not None:
            return OF_ALL, _refusal(server, news.error)
        if news.meta_info is None or news.index < 0:
            raise ValueError(f"an event about input {news.index}")
    except (ValueError, TypeError) as error:
        return OF_ALL, refuse_field(server, error) or _unusable(server, error)
    return news.index, _piece(news.meta_info, server)


def _piece(info: "Info", server: str) -> Piece | ServerError:
    """Return a response's piece, or the reason why it cannot be used or was aborted."""
    reason = info.finish_reason
    if reason and (status := reason.status_code):
        kind = Unavailable if may_pass(status) else ServerError
        return kind(f"{server} aborted a request: {reason.message}", fault_of(status))
    try:
        if info.columns is None:
            raise ValueError("no log-probs")
        sent = read_columns(info.columns)
        count = sent.shape[1]
        columns = np.concatenate([sent, token_versions(info.labels, count)[None]])
        return Piece(columns, FinishReason(reason.type) if reason else None, info)
    except WrongLabels as error:
        return Unavailable(f"{server} {error}", "wrong_labels")
    except (ValueError, OverflowError) as error:
        return _unusable(server, error)


def _unusable(server: str, error: Exception) -> Unavailable:
    return Unavailable(f"{server} gave an unusable answer: {error!r}", "unusable")


def _refusal(name: str, error: Any) -> ServerError:
    """Return the error that a server reports for a request in an event."""
    code = error.get("code") if isinstance(error, dict) else None
    fault = fault_of(code) if isinstance(code, int) else "server_error"
    kind = ServerError if fault == "refused" else Unavailable
    return kind(f"{name} refused a request: {error.get('message') if isinstance(error, dict) else error}", fault)


class Finish(msgspec.Struct, gc=False):
    """Why a response ended; with a `status_code` the server gave it up."""

    type: str
    message: str | None = None
    status_code: int | None = None


class Info(msgspec.Struct):
    """News since the event before: `columns` of tokens and log-probs, and `labels`, the versions that made them.

    A request that was given up may have neither. Fields of columns are added by `_decoder`.
    """

    columns: bytes | None = msgspec.field(name=COLUMNS, default=None)  # base64
    finish_reason: Finish | None = None
    labels: list[tuple[str | None, int]] = msgspec.field(name=LABELS, default_factory=list)


class AnswerEvent(msgspec.Struct):
    """News of the request's input number `index`, or an error, which is about all of them."""

    index: int = -1
    meta_info: Info | None = None
    error: Any = None


@cache
def _decoder(columns: tuple[Column, ...]) -> Callable[[bytes], AnswerEvent]:
    """Return a function that decodes events with the fields of these columns; it raises ValueError."""
    info = msgspec.defstruct("Info", fields_of(columns), bases=(Info,))
    event = msgspec.defstruct("AnswerEvent", [("meta_info", info | None, None)], bases=(AnswerEvent,))
    decoder: Any = msgspec.json.Decoder(event)
    return decoder.decode
