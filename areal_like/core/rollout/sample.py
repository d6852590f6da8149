"""One sample on its way from prompt to response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from areal_like.core.columns import Column, Columns, Values, join, served_columns
from areal_like.core.errors import ServerError
from areal_like.core.images import Images
from areal_like.core.rollout.http import Unavailable
from areal_like.core.rollout.response import Response
from areal_like.core.rollout.sampling import Sampling
from areal_like.core.rollout.server import Piece
from areal_like.core.rollout.unusable import refuse
from areal_like.core.types import FinishReason, Ints

CHUNK = 512  # tokens after which a server reports: at most as many are lost with it

ROOM = 1024  # tokens that a response's first arrays hold, or as many as it may have

type OnTokens = Callable[[Sequence[int]], object]
"""Receives the tokens of a response as they arrive; must not raise."""


class WrongVersion(ServerError):
    """A server generated with weights that it should not have had."""


@dataclass(eq=False)
class Sample:
    """A prompt and its response so far: `length` tokens, and the finish reason at its end.

    `begun` is set with its first token if that is `awaited`, else with the server's first event, and when it ends.
    Columns of inputs are wanted of tokens from `inputs_from` on; a server that fails loses the columns of its tokens,
    and the next one computes them again. With `on_tokens` the server sends each token at once, and that is called with
    it. `images` are the images of the prompt, which every server that continues the sample receives.
    """

    prompt: Ints
    sampling: Sampling
    seed: int | None = None
    awaited: bool = False
    inputs_from: int = 0
    on_tokens: OnTokens | None = None
    images: Images = ()
    length: int = 0
    finish_reason: FinishReason | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    _held: Ints = field(default_factory=lambda: np.empty((3, 0), np.int32))  # as a piece's columns, with room for more
    _columns: list[tuple[int, Columns]] = field(default_factory=list)  # of each piece, with its tokens
    _inputs: Columns = field(default_factory=dict)  # of tokens as inputs, with the last piece

    @property
    def response(self) -> Response:
        """The response as far as it has come."""
        tokens, logprobs, versions = self._held[:, : self.length]
        columns = join(self._columns)
        return Response(tokens, logprobs.view(np.float32), versions, self.finish_reason, columns, self._inputs)

    @property
    def request(self) -> dict[str, Any]:
        """Fields of a request for the columns that are wanted; samples of one request have equal ones."""
        return {name: value for fields in self._wanted.values() for name, value in fields.items()}

    @cached_property
    def _wanted(self) -> dict[Column, Mapping[str, Any]]:
        """The columns that servers return for the sample, with the fields that request each."""
        asked = ((column, column.request(self.sampling, self.inputs_from)) for column in served_columns().values())
        return {column: fields for column, fields in asked if fields is not None}

    @property
    def input(self) -> Ints:
        """Tokens from which a server continues, `[tokens]`."""
        return np.concatenate([self.prompt, self._held[0, : self.length]]) if self.length else self.prompt

    @property
    def params(self) -> dict[str, Any]:
        """Sampling parameters for the missing tokens, by SGLang's names."""
        sampling = self.sampling
        params: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens - self.length,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop_token_ids": list(sampling.stop_token_ids),
            "stream_interval": self._interval,
        }
        if sampling.ignore_eos:
            params["ignore_eos"] = True
        if sampling.top_k > 0:
            params["top_k"] = sampling.top_k
        if sampling.min_p > 0:
            params["min_p"] = sampling.min_p
        return params if self.seed is None else params | {"sampling_seed": self.seed}

    @property
    def _interval(self) -> int:
        """The number of tokens after which the server sends them."""
        if self.on_tokens is not None:
            return 1
        # SGLang 0.5.17 (output_streamer.py) also tells of the first token, but not where this is negative: that would
        # be every second event of short responses
        return CHUNK if self.awaited else -CHUNK

    def extend(self, piece: Piece, server: str, first: int, last: int) -> int:
        """Add a server's tokens since the last call; return their number.

        `first` and `last` are the versions that may have made it. Raises WrongVersion, and Unavailable for more than
        requested; nothing is added then.
        """
        columns, ended, _ = piece
        tokens = columns.shape[1]
        if self.length + tokens > self.sampling.max_new_tokens:
            raise Unavailable(f"{server} returned more tokens than requested", "unusable")
        if tokens and not first <= columns.item(2, 0) <= columns.item(2, -1) <= last:
            made = ", ".join(map(str, dict.fromkeys(columns[2].tolist())))
            raise WrongVersion(
                f"{server} generated with weights of version {made}; expected {first} to {last}", "wrong_version"
            )
        if self._wanted:
            own, self._inputs = self._read(piece, tokens, server)
            self._columns.append((tokens, own))
        self._add(columns)
        if ended is None and self.length >= self.sampling.max_new_tokens:
            ended = FinishReason.LENGTH  # a server that fails now has nothing left to do
        if ended and tokens and columns.item(0, -1) in self.sampling.stop_token_ids:
            ended = FinishReason.STOP  # SGLang calls an end token at the limit `length`
        self.finish_reason = ended
        self.begun.set()
        if self.on_tokens is not None and tokens:
            self.on_tokens(columns[0].tolist())
        return tokens

    def _read(self, piece: Piece, tokens: int, server: str) -> tuple[Columns, Columns]:
        """Return the columns of a piece's tokens, and, with the end, of all inputs.

        Raises ServerError where they are unusable.
        """
        own, inputs = dict[str, Values](), dict[str, Values]()
        length, ended = self.length + tokens, piece.finish_reason is not None
        for column in self._wanted:
            if not (ended or length >= self.sampling.max_new_tokens if column.is_input else tokens):
                continue
            if column.is_input and not ended:
                raise Unavailable(f"{server} did not end a response at the requested number of tokens", "unusable")
            count = len(self.prompt) + length - 1 - self.inputs_from if column.is_input else tokens
            try:
                values = column.read(piece, count, self.sampling)
            except ValueError as problem:
                raise refuse(server, problem, column) from problem
            (inputs if column.is_input else own)[column.name] = values
        return own, inputs

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
