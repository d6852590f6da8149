"""One sample on its way from prompt to response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from areal_like.core.columns import Column, Columns, Form, Values, join, served_columns
from areal_like.core.errors import ServerError
from areal_like.core.rollout.http import Unavailable
from areal_like.core.types import FinishReason, Floats, Images, Ints, Piece


@dataclass(eq=False)
class Response:
    """Response to one prompt; arrays and `columns` are `[generated tokens]`.

    `inputs` are columns of tokens as inputs. Their rows begin with the first token whose row was unknown, in the
    prompt, and end with the last token but one, which made the last.
    """

    tokens: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    finish_reason: FinishReason | None = None
    columns: Columns = field(default_factory=dict)
    inputs: Columns = field(default_factory=dict)

    def cut(self, tokens: int) -> Response:
        """Return the first tokens alone, without an end."""
        size = min(tokens, len(self.tokens))
        removed = len(self.tokens) - size
        columns = {name: values[:size] for name, values in self.columns.items()}
        inputs = {name: rows[: max(0, len(rows) - removed)] for name, rows in self.inputs.items()}
        return Response(self.tokens[:size], self.logprobs[:size], self.versions[:size], None, columns, inputs)


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. Temperature 0 is greedy, `top_k` -1 has no limit.

    A response ends with a token of `stop_token_ids` or, unless `ignore_eos`, the model's end token. `columns` are
    the forms of the columns that servers return for capabilities. `adapter` is the name of one of several that the
    servers have. The tokens of evaluations are not `trained`.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    columns: Mapping[str, Form] = field(default_factory=dict)
    top_k: int = -1
    min_p: float = 0.0
    adapter: str | None = None
    trained: bool = True

    @property
    def is_cut(self) -> bool:
        """Whether trained tokens are drawn from some of the vocabulary: servers then return the ids for each."""
        return self.trained and self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


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


def refuse(server: str, problem: object, column: Column) -> ServerError:
    """Return the error of a server without a usable column; it would compute the same again."""
    return ServerError(f"{server} {problem}. {column.fix}", "unusable", [server])


def refuse_field(server: str, error: Exception) -> ServerError | None:
    """Return the error of an answer that cannot be decoded because of a field of a column; None for other fields."""
    for column in served_columns().values():
        if any(f"meta_info.{name}" in str(error) for name in column.sent):
            return refuse(server, f"gave an unusable answer: {error}", column)
    return None
