"""Shell scripts and command lines as words with their positions; only sums of whole numbers are calculated."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO

_ARITHMETIC = re.compile(r"\$\(\(([^\n()]{1,200})\)\)")
_GAP = re.compile(r"(?:\s+(?:#[^\n]*)?|(?<![^\n])#[^\n]*)+")
_JOINED = re.compile(r"\\\r?\n")


@dataclass(frozen=True, slots=True)
class ShellWord:
    """A word without its quotes, its position in the text, and whether it is the first of its line."""

    text: str
    start: int
    end: int
    first: bool


def words(text: str) -> Iterator[ShellWord]:
    """Split a script into words as a shell does; split a text with an open quote line by line."""
    text = _JOINED.sub(lambda match: " " * len(match[0]), text)
    text = _ARITHMETIC.sub(lambda match: re.sub(r"\s", "", match[0]).ljust(len(match[0])), text)
    try:
        yield from list(_split(text, 0))
    except ValueError:
        start = 0
        for line in text.splitlines(keepends=True):
            try:
                yield from list(_split(line, start))
            except ValueError:
                yield from list(_split(re.sub(r"[\"'\\]", " ", line), start))
            start += len(line)


def _split(text: str, offset: int) -> Iterator[ShellWord]:
    stream = StringIO(text)
    lexer = shlex.shlex(stream, posix=True)
    lexer.whitespace_split = True
    end = 0
    while (word := lexer.get_token()) is not None:
        start = end + len(gap[0]) if (gap := _GAP.match(text, end)) else end
        first = end == 0 or "\n" in text[end:start]
        end = stream.tell()
        end -= end > start and text[end - 1].isspace()
        yield ShellWord(word, offset + start, offset + end, first)


def with_names(text: str) -> str:
    """Return the text with the variables of its arithmetic written as references."""
    return _ARITHMETIC.sub(lambda match: re.sub(r"(?<![\w${])([A-Za-z_]\w*)", r"${\1}", match[0]), text)


def calculate(text: str) -> str:
    """Return the text with its sums and products of whole numbers calculated."""
    return _ARITHMETIC.sub(_result, text)


def _result(match: re.Match[str]) -> str:
    """Return the result of a shell's sum or product of whole numbers; names are variables there."""
    text = re.sub(r"\s", "", match[1])
    if not re.fullmatch(r"\d{1,9}([-+*/%]\d{1,9}){0,9}", text):
        return match[0]
    terms: list[int] = []
    for sign, factors in re.findall(r"([-+]?)([^-+]+)", text):
        first, *rest = re.split(r"([*/%])", factors)
        value = int(first)
        for operator, operand in zip(rest[::2], map(int, rest[1::2]), strict=True):
            if operator != "*" and operand == 0:
                return match[0]
            value = value * operand if operator == "*" else value // operand if operator == "/" else value % operand
        terms.append(-value if sign == "-" else value)
    return str(sum(terms))
