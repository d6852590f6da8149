"""One sample on its way from prompt to response."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areal_like.rollout.sglang.answers import Piece
from areal_like.rollout.sglang.http import ServerError, Unavailable
from areal_like.types import FinishReason, Floats, Ints

CHUNK = 512  # tokens after which a server says what it has: as much is lost with it at most

ROOM = 1024  # tokens that a response's first arrays hold, or as many as it may have


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. Temperature 0 is greedy.

    A response ends with a token of `stop_token_ids` or, unless `ignore_eos`, the model's end token.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(eq=False)
class Response:
    """Response to one prompt; arrays are `[generated tokens]`."""

    tokens: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    finish_reason: FinishReason | None = None


class WrongVersion(ServerError):
    """A server generated with weights that it should not have had."""


@dataclass(eq=False)
class Sample:
    """A prompt, and what has come of the response: `length` tokens, and why it ended, once it has.

    `begun` is set with its first token if that is `awaited`, else with what the server says first, and when it ends.
    """

    prompt: Ints
    sampling: Sampling
    seed: int | None = None
    awaited: bool = False
    length: int = 0
    finish_reason: FinishReason | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    _held: Ints = field(default_factory=lambda: np.empty((3, 0), np.int32))  # as a piece's columns, with room for more

    @property
    def response(self) -> Response:
        """The response as far as it has come."""
        tokens, logprobs, versions = self._held[:, : self.length]
        return Response(tokens, logprobs.view(np.float32), versions, self.finish_reason)

    @property
    def input(self) -> Ints:
        """What a server has to go on from, `[tokens]`."""
        return np.concatenate([self.prompt, self._held[0, : self.length]]) if self.length else self.prompt

    @property
    def params(self) -> dict[str, Any]:
        """SGLang's sampling parameters for what is missing."""
        sampling = self.sampling
        params: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens - self.length,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop_token_ids": list(sampling.stop_token_ids),
            # SGLang 0.5.17 (output_streamer.py) also tells of the first token, but not where this is negative: that
            # would be every second event of short responses
            "stream_interval": CHUNK if self.awaited else -CHUNK,
        }
        if sampling.ignore_eos:
            params["ignore_eos"] = True
        return params if self.seed is None else params | {"sampling_seed": self.seed}

    def extend(self, piece: Piece, server: str, first: int, last: int) -> int:
        """Add what SGLang has generated since the last time; returns how many tokens.

        `first` and `last` are the versions that may have made it. Raises WrongVersion, and Unavailable for more than
        was asked for; nothing is added then.
        """
        columns, ended = piece
        tokens = columns.shape[1]
        if self.length + tokens > self.sampling.max_new_tokens:
            raise Unavailable(f"{server} answered more than the tokens that it was asked for", "unusable")
        if tokens and not first <= columns.item(2, 0) <= columns.item(2, -1) <= last:
            made = ", ".join(map(str, dict.fromkeys(columns[2].tolist())))
            raise WrongVersion(
                f"{server} generated with weights {made}, where {first} to {last} were possible", "wrong_version"
            )
        self._add(columns)
        if ended is None and self.length >= self.sampling.max_new_tokens:
            ended = FinishReason.LENGTH  # a server that fails now has nothing left to do
        if ended and tokens and columns.item(0, -1) in self.sampling.stop_token_ids:
            ended = FinishReason.STOP  # SGLang calls an end token at the limit `length`
        self.finish_reason = ended
        self.begun.set()
        return tokens

    def _add(self, columns: Ints) -> None:
        """Append a piece's columns; the array that holds them is twice as large when it is full."""
        start, end = self.length, self.length + columns.shape[1]
        if end > self._held.shape[1]:
            room = max(end, min(max(2 * end, ROOM), self.sampling.max_new_tokens))
            grown = np.empty((3, room), np.int32)
            grown[:, :start] = self._held[:, :start]
            self._held = grown
        self._held[:, start:end] = columns
        self.length = end
