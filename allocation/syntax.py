"""Text to syntax tree and back. Every node knows its span; `str` of a node parses to an equal node.

Spans do not take part in comparison: two trees are equal when they say the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from allocation.diagnostics import Span
from allocation.lalr import Parser, Token

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
    """A letter and its count, as written: `d4`, `d*`; `count` is empty where none was written."""

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

    def __str__(self) -> str:
        if self.ffn is None:
            return _join(self.attn)
        return f"(attn:{_join(self.attn)}|ffn:{_join(self.ffn)})"

    def shell(self) -> str:
        """The spelling that needs no quotes in a shell."""
        return str(self) if self.ffn is None else f"attn:{_join(self.attn)}/ffn:{_join(self.ffn)}"


@dataclass(frozen=True, slots=True)
class Member:
    """One engine: backend, name, layout and GPU ids (empty: placed by the compiler)."""

    backend: Word
    layout: Layout
    name: Word | None = None
    gpus: tuple[GpuRange, ...] = ()
    span: Span = _span()

    def text(self, *, shell: bool = False) -> str:
        """The member in its shortest spelling, or in the one that needs no quotes in a shell."""
        name = f"[{self.name}]" if self.name else ""
        gpus = "@" + ",".join(map(str, self.gpus)) if self.gpus else ""
        return f"{self.backend}{name}:{self.layout.shell() if shell else self.layout}{gpus}"

    def __str__(self) -> str:
        return self.text()


@dataclass(frozen=True, slots=True)
class Group:
    """Members that share their GPUs."""

    members: tuple[Member, ...]

    def __str__(self) -> str:
        return "|".join(map(str, self.members))


@dataclass(frozen=True, slots=True)
class Allocation:
    """Groups on separate GPUs, left to right."""

    groups: tuple[Group, ...]

    @property
    def members(self) -> Iterator[Member]:
        """All members, left to right."""
        return (member for group in self.groups for member in group.members)

    def text(self, *, shell: bool = False) -> str:
        """The allocation as text; `shell` avoids parentheses, but `|` between members remains."""
        return "+".join("|".join(member.text(shell=shell) for member in group.members) for group in self.groups)

    def normalised(self) -> Allocation:
        """The same allocation with the letters in the published order, `d p t c e v`."""
        return Allocation(tuple(Group(tuple(map(_normalised, group.members))) for group in self.groups))

    def __str__(self) -> str:
        return self.text()


def _normalised(member: Member) -> Member:
    def ordered(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        plain = (Dim(d.letter, d.count.lstrip("0") or d.count, d.span) for d in dims)
        return tuple(sorted(plain, key=lambda dim: LETTERS.find(dim.letter)))

    old = member.layout
    layout = Layout(ordered(old.attn), None if old.ffn is None else ordered(old.ffn), old.span)
    return Member(member.backend, layout, member.name, member.gpus, member.span)


def _join(dims: tuple[Dim, ...]) -> str:
    return "".join(map(str, dims))


def _dims(*tokens: Token) -> tuple[Dim, ...]:
    dims = []
    for _, text, start, end in tokens:
        letter = text.rstrip("0123456789*")
        dims.append(Dim(letter, text[len(letter) :], Span(start, end)))
    return tuple(dims)


def _plain(dims: tuple[Dim, ...]) -> Layout:
    return Layout(dims, None, Span(dims[0].span.start, dims[-1].span.end))


def _folded(first: Token, attn: tuple[Dim, ...], _: Token, ffn: tuple[Dim, ...]) -> Layout:
    return Layout(attn, ffn, Span(first.start, ffn[-1].span.end))


def _gpu_range(first: Token, last: Token | None = None) -> GpuRange:
    last = last or first
    return GpuRange(first.text, last.text, Span(first.start, last.end))


def _member(backend: Token, *parts: Any) -> Member:
    name = parts[0] if isinstance(parts[0], Word) else None
    layout, *rest = parts if name is None else parts[1:]
    gpus = rest[0] if rest else ()
    end = gpus[-1].span.end if gpus else layout.span.end
    return Member(_word(backend), layout, name, gpus, Span(backend.start, end))


def _word(token: Token) -> Word:
    return Word(token.text, Span(token.start, token.end))


@cache
def parser() -> Parser:
    """The parser of allocations, made on first use."""
    return Parser(
        {
            "allocation": lambda *groups: Allocation(groups),
            "group": lambda *members: Group(members),
            "member": _member,
            "name": _word,
            "plain": _plain,
            "folded": _folded,
            "dims": _dims,
            "gpus": lambda *ranges: ranges,
            "gpu_range": _gpu_range,
        }
    )
