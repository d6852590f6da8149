"""Columns: values per token, from a server's answer to the trainer's device.

A column is declared once, beside the code that owns it. Joining turns, cutting responses, batches, mini-batches,
packing and copies to the device treat all columns alike, by their declarations.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import chain
from typing import Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

type Values = NDArray[Any] | Ragged
"""`[tokens, …]`, or a list for each token."""

type Columns = Mapping[str, Any]
"""Values of the same tokens, by the names of their columns."""

type Use = Literal["loss", "label", "sampling", "input", "host"]
"""Where the trainer uses a column.

`loss`: a field of the loss. `label`: beside the label in the head that computes log-probs. `sampling` is the same for
settings that the token was sampled with; algorithms with a temperature of their own drop it. `input`: how the policy
computed the token as an input; other models have no such values. `host`: never on the device.
"""


@dataclass(frozen=True, eq=False)
class Column:
    """The declaration of a value per token, of `width` numbers (None: any shape) of a `dtype`.

    A `ragged` column has a list of ids for each token. Tokens without values, and padding, have `fill`, which may
    depend on the data type. With `follows_prompt`, sequences share a prompt even if their values in it differ.

    A column with `sent` comes from servers: `sent` are the fields of an answer's `meta_info`, with their types.
    `request` returns the request's fields for a sampling, given the number of leading tokens whose inputs are known;
    None where the column is not wanted. `sampling.columns` has the forms of the columns that capabilities want.
    `reader` returns the values of the last `count` tokens from (piece, count, sampling), and raises ValueError with the
    problem; without it they are the only field. `fix` tells the user how to correct an unusable answer.
    """

    name: str
    dtype: Any = np.float32
    width: tuple[int, ...] | None = ()
    ragged: bool = False
    fill: float | Callable[[np.dtype[Any]], int] = 0
    use: Use = "loss"
    follows_prompt: bool = False
    sent: Mapping[str, Any] = field(default_factory=dict)
    request: Callable[[Any, int], Mapping[str, Any] | None] = lambda sampling, known: None
    reader: Callable[[Any, int, Any], Values] | None = None
    fix: str = ""

    @property
    def is_input(self) -> bool:
        """Whether values are about tokens as inputs."""
        return self.use == "input"

    def read(self, piece: Any, count: int, sampling: Any) -> Values:
        """Return the values of the last `count` tokens of a server's answer; raise ValueError with the problem."""
        if self.reader is not None:
            return self.reader(piece, count, sampling)
        (name,) = self.sent
        given = getattr(piece.info, name, None) or ()
        values = Ragged.from_lists(given) if self.ragged else np.asarray(given, self.dtype)
        if len(values) != count:
            raise ValueError(f"returned {len(values)} values of {name} for {count} tokens")
        if isinstance(values, np.ndarray) and self.width not in (None, values.shape[1:]):
            raise ValueError(f"returned values of {name} of the shape {values.shape[1:]} per token, not {self.width}")
        return values

    def empty(self, tokens: int, like: Values) -> Values:
        """Return the values of tokens without any, in the form of other tokens' values."""
        if isinstance(like, Ragged):
            return Ragged.none(tokens)
        return np.full((tokens, *like.shape[1:]), self.fill_of(like.dtype), like.dtype)

    def fill_of(self, dtype: np.dtype[Any]) -> float:
        """Return the fill of values of a data type."""
        return self.fill(dtype) if callable(self.fill) else self.fill

    def select(self, values: Values, places: NDArray[np.int64]) -> NDArray[Any] | None:
        """Return the values at some places as an array, with fill at the place -1; None where all lists are empty."""
        padding = places < 0
        here = values[np.where(padding, 0, places)]
        if isinstance(here, Ragged):
            if not len(here.ids):
                return None
            here = here.as_rows(self.fill_of(here.ids.dtype))
        if padding.any():
            here[padding] = self.fill_of(here.dtype)
        return here


COLUMNS: dict[str, Column] = {}
SERVED: dict[str, Column] = {}  # returned by servers


def declare(column: Column) -> str:
    """Register a column and return its name."""
    if column.name in COLUMNS:
        raise ValueError(f"the column {column.name} is declared twice")
    COLUMNS[column.name] = column
    if column.sent:
        SERVED[column.name] = column
    return column.name


@cache
def _load_columns() -> None:
    """Import the columns of capabilities (`columns.py` of their folders), which declare them."""
    registry = import_module("areal_like.registry")  # by its name: nearly every module imports this one
    list(registry.find_modules("columns"))


def all_columns() -> Mapping[str, Column]:
    """Return the columns by name, those of capabilities among them."""
    _load_columns()
    return COLUMNS


def served_columns() -> Mapping[str, Column]:
    """Return the columns that servers can return, by name."""
    _load_columns()
    return SERVED


class Form(Protocol):
    """The form in which servers return a column for a model, as the column's functions need it."""

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's value."""


def column_of(name: str, values: Values) -> Column:
    """Return the column of a name; a field that an algorithm adds is one of the loss."""
    if (column := all_columns().get(name)) is not None:
        return column
    if isinstance(values, Ragged) or not np.issubdtype(values.dtype, np.floating):
        raise ValueError(f"no column {name} is declared in this process (areal_like.columns.declare)")
    return Column(name)


@dataclass(frozen=True)
class Ragged:
    """A list of token ids for each token: list i is `ids[ends[i] : ends[i + 1]]`.

    `ids` is int32 and flat, `ends` int64 `[lists + 1]`, and begins with 0.
    """

    ids: NDArray[np.int32]
    ends: NDArray[np.int64]

    @classmethod
    def from_lists(cls, lists: Iterable[Sequence[int]]) -> Self:
        """Return these lists; raise ValueError for ids that no token has."""
        known = list(lists)
        ends = _ends([len(each) for each in known])
        try:
            return cls(np.fromiter(chain.from_iterable(known), np.int32, ends[-1]), ends)
        except OverflowError as error:
            raise ValueError(f"returned ids that no token has: {error}") from error

    @classmethod
    def none(cls, tokens: int) -> Self:
        """Return empty lists for as many tokens."""
        return cls(np.empty(0, np.int32), np.zeros(tokens + 1, np.int64))

    @classmethod
    def join(cls, parts: Sequence["Ragged"]) -> Self:
        """Return the lists of the parts one after the other."""
        ids = np.concatenate([np.empty(0, np.int32), *(part.ids for part in parts)])
        return cls(ids, _ends(np.concatenate([np.empty(0, np.int64), *(part.counts for part in parts)])))

    def __len__(self) -> int:
        return len(self.ends) - 1

    @property
    def counts(self) -> NDArray[np.int64]:
        """Lengths of the lists, `[lists]`."""
        return np.diff(self.ends)

    def __getitem__(self, places: slice | NDArray[np.int64] | NDArray[np.bool]) -> Self:
        """Return the lists of a slice without a step, at some places in their order, or where a mask is true."""
        if isinstance(places, slice):
            start, end, _ = places.indices(len(self))
            ends = self.ends[start : max(start, end) + 1]
            return type(self)(self.ids[ends[0] : ends[-1]], ends - ends[0])
        chosen = np.flatnonzero(places) if places.dtype == bool else places
        counts = self.counts[chosen]
        ends = _ends(counts)
        within = np.arange(ends[-1]) - np.repeat(ends[:-1], counts)
        return type(self)(self.ids[np.repeat(self.ends[chosen], counts) + within], ends)

    def as_rows(self, fill: float = -1) -> NDArray[np.int32]:
        """Return the lists as rows of one width, at least 1, filled up: `[lists, width]`."""
        counts = self.counts
        rows = np.full((len(counts), max(1, int(counts.max(initial=0)))), fill, np.int32)
        rows[np.arange(rows.shape[1]) < counts[:, None]] = self.ids
        return rows


def _ends(counts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(counts, np.int64))])


def join(parts: Sequence[tuple[int, Columns]]) -> dict[str, Any]:
    """Join all columns that any part has, each part with its number of tokens."""
    joined: dict[str, Values] = {}
    for name, like in {name: values for _, columns in reversed(parts) for name, values in columns.items()}.items():
        column = column_of(name, like)
        known: list[Any] = [columns[name] if name in columns else column.empty(n, like) for n, columns in parts]
        joined[name] = Ragged.join(known) if isinstance(like, Ragged) else np.concatenate(known)
    return joined
