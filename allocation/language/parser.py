"""Lark's LALR parser of the grammar: text to nodes, without an intermediate tree.

The lexer is contextual: it considers only the terminals that may follow, so `d4` is a name in one place and a dimension
in another.
"""

import re
from dataclasses import dataclass
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, cast

from lark import Lark, TextSlice, Token, Transformer
from lark.exceptions import UnexpectedInput, UnexpectedToken

from allocation.diagnostics import Span
from allocation.language.syntax import Allocation, Dim, GpuRange, Group, Layout, Member, Word

GRAMMAR = Path(__file__).with_name("grammar.lark")
_DIM = re.compile(r"([A-Za-z]+)(\*|[0-9]*)")


@dataclass(eq=False)
class Unexpected(Exception):
    """A mismatch with the grammar at `position`; `expected` are the terminals that would have fitted."""

    position: int
    expected: frozenset[str]


def parse(text: str, rule: str, start: int, end: int) -> Any:
    """Return the node of `rule`, `allocation` or `member`, between `start` and `end`. Raises `Unexpected`."""
    try:
        return _lark().parse(TextSlice(text, start, end), start=rule)
    except UnexpectedInput as error:
        ended = isinstance(error, UnexpectedToken) and error.token.type == "$END"
        position = end if ended or error.pos_in_stream is None else error.pos_in_stream
        raise Unexpected(position, frozenset(error.interactive_parser.accepts())) from error


@cache
def _lark() -> Lark:
    # Lark caches the compiled grammar beside Python's compiled files, and renews it when either changes.
    compiled = Path(cache_from_source(__file__)).with_name("grammar.lark.cache")
    return Lark(
        GRAMMAR.read_text(), parser="lalr", start=["allocation", "member"], maybe_placeholders=False,
        transformer=_Nodes(), cache=str(compiled),
    )  # fmt: skip


class _Nodes(Transformer[Token, Allocation]):
    """The node of every rule of the grammar."""

    def allocation(self, groups: list[Group]) -> Allocation:
        return Allocation(tuple(groups))

    def group(self, members: list[Member]) -> Group:
        return Group(tuple(members))

    def member(self, parts: list[Any]) -> Member:
        backend, *parts = parts
        name = parts.pop(0) if isinstance(parts[0], Word) else None
        layout, *rest = parts
        gpus = rest[0] if rest else ()
        end = gpus[-1].span.end if gpus else layout.span.end
        return Member(_word(backend), layout, name, gpus, Span(backend.start_pos, end))

    def name(self, tokens: list[Token]) -> Word:
        return _word(tokens[0])

    def plain(self, parts: list[tuple[Dim, ...]]) -> Layout:
        (dims,) = parts
        return Layout(dims, None, Span(dims[0].span.start, dims[-1].span.end))

    def folded_layout(self, parts: list[Any]) -> Layout:
        first, attn, _, ffn = parts
        return Layout(attn, ffn, Span(first.start_pos, ffn[-1].span.end))

    def dims(self, tokens: list[Token]) -> tuple[Dim, ...]:
        found = []
        for token in tokens:
            start, _ = _span(token)
            found += [Dim(m[1], m[2], Span(start + m.start(), start + m.end())) for m in _DIM.finditer(token)]
        return tuple(found)

    def gpus(self, ranges: list[GpuRange]) -> tuple[GpuRange, ...]:
        return tuple(ranges)

    def gpu_range(self, bounds: list[Token]) -> GpuRange:
        first, last = bounds[0], bounds[-1]
        return GpuRange(str(first), str(last), Span(_span(first).start, _span(last).end))


def _word(token: Token) -> Word:
    return Word(str(token), _span(token))


def _span(token: Token) -> Span:
    return Span(cast("int", token.start_pos), cast("int", token.end_pos))
