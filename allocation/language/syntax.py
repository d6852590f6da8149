"""The syntax tree. Every node knows its span; `spelling.py` turns a tree into text.

Spans are ignored in comparisons: two trees are equal if they have the same meaning.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from allocation.diagnostics import Span

LONGEST = 2048
LARGEST = 10**18
LETTERS = "dptcev"

_ANYWHERE = Span(0, 0)


def _span() -> Any:
    return field(default=_ANYWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Word:
    """A backend or a name."""

    text: str
    span: Span = _span()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Dim:
    """A letter and its count, as written: `d4`, `d*`; `count` is empty if it is missing."""

    letter: str
    count: str
    span: Span = _span()

    def __str__(self) -> str:
        return self.letter + self.count


@dataclass(frozen=True, slots=True)
class GpuRange:
    """GPU ids `first` to `last`, both included, as written."""

    first: str
    last: str
    span: Span = _span()

    def __str__(self) -> str:
        return self.first if self.first == self.last else f"{self.first}-{self.last}"


@dataclass(frozen=True, slots=True)
class Layout:
    """The dimensions; `ffn` is None unless the layout is folded."""

    attn: tuple[Dim, ...]
    ffn: tuple[Dim, ...] | None = None
    span: Span = _span()

    @property
    def dims(self) -> tuple[tuple[str, Dim], ...]:
        """Every dimension with its part, `attn` or `ffn`; all are in `attn` unless the layout is folded."""
        return (*(("attn", dim) for dim in self.attn), *(("ffn", dim) for dim in self.ffn or ()))


@dataclass(frozen=True, slots=True)
class Member:
    """One engine: backend, name, layout and GPU ids (empty: placed by the compiler)."""

    backend: Word
    layout: Layout
    name: Word | None = None
    gpus: tuple[GpuRange, ...] = ()
    span: Span = _span()


@dataclass(frozen=True, slots=True)
class Group:
    """Members that share their GPUs."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Allocation:
    """Groups on separate GPUs, left to right."""

    groups: tuple[Group, ...]

    @property
    def members(self) -> Iterator[Member]:
        """All members, left to right."""
        return (member for group in self.groups for member in group.members)
