"""What SGLang 0.5.17 streams as an answer to `/generate`, typed: a field of another type is an error, not a surprise.

Decoding takes most of the controller's time, so only what is used is decoded, and nothing twice.
"""

from typing import Any

import msgspec

from areal_like.rollout.sglang.versions import LABELS


class Finish(msgspec.Struct, gc=False):
    """Why a response ended; with a `status_code` the server gave it up."""

    type: str
    message: str | None = None
    status_code: int | None = None


class Info(msgspec.Struct):
    """Tokens since the event before: log-prob, id and text or null of each; `labels` are JSON, a version for each.

    A request that was given up may have neither.
    """

    output_token_logprobs: list[tuple[float, int, str | None]] | None = None
    finish_reason: Finish | None = None
    labels: msgspec.Raw = msgspec.field(name=LABELS, default=msgspec.Raw(b"[]"))


class Event(msgspec.Struct):
    """News of the request's input number `index`, or an error, which is about all of them."""

    index: int = -1
    meta_info: Info | None = None
    error: Any = None


decode = msgspec.json.Decoder(Event).decode  # raises ValueError (msgspec.DecodeError)
