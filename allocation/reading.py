"""Text to syntax tree with findings instead of an exception, and all syntax errors at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from allocation.diagnostics import AllocationError, Finding, Problem, Source, Span, rule, run_rules
from allocation.lalr import Unexpected
from allocation.syntax import LONGEST, Allocation, Group, Member, parser

MOST_SYNTAX_FINDINGS = 20

_LANGUAGE = "the allocation language"
_DIMS = re.compile(r"\s*((?:[dptcev](?:\*|[0-9]+)\s*)+)$")
_DOT = re.compile(r"\s*([A-Za-z_]\w*)\s*\.\s*((?:[a-z][0-9]+)+)")
_TERMINALS = {
    "NAME": "a backend or a name",
    "DIM": "dimensions such as `d4t2`",
    "INT": "a GPU id",
    "ATTN": "`attn:`",
    "FFN": "`ffn:`",
    "COLON": "`:`",
    "LPAR": "`(`",
    "RPAR": "`)`",
    "LSQB": "`[`",
    "RSQB": "`]`",
    "PLUS": "`+`",
    "VBAR": "`|`",
    "SLASH": "`/`",
    "AT": "`@`",
    "COMMA": "`,`",
    "MINUS": "`-`",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """A member of `text`, between `start` and `end`, that does not fit the grammar at `position`."""

    text: str
    start: int
    end: int
    position: int
    expected: tuple[str, ...]

    @property
    def member(self) -> str:
        """The text of the member alone."""
        return self.text[self.start : self.end]

    @property
    def whole(self) -> tuple[Span, ...]:
        """The member's span, without the blanks around it."""
        text = self.member
        return (Span(self.start + len(text) - len(text.lstrip()), max(self.start, self.start + len(text.rstrip()))),)

    @property
    def here(self) -> tuple[Span, ...]:
        """The one character (or the end) that does not fit."""
        return (Span(self.position, min(self.position + 1, max(self.end, self.position))),)


def read(source: Source) -> tuple[Allocation, list[Finding]]:
    """The tree of `source.text` and its syntax findings; with findings the tree holds the members that are right."""
    text = source.text
    findings = run_rules("text", source, text)
    if findings:
        return Allocation(()), findings
    try:
        return parser().parse(text, "allocation"), []
    except Unexpected:
        return _read_members(source)


def parse(text: str) -> Allocation:
    """The syntax tree of a whole allocation. Raises `AllocationError` with every syntax finding.

    Words are not judged: an unknown backend or letter parses.
    """
    tree, findings = read(Source(text))
    if findings:
        raise AllocationError(findings)
    return tree


def _read_members(source: Source) -> tuple[Allocation, list[Finding]]:
    """Reads each member alone, so that one that is wrong does not hide the others."""
    groups: list[list[Member]] = [[]]
    findings: list[Finding] = []
    for start, end in _pieces(source.text):
        if start and source.text[start - 1] == "+":
            groups.append([])
        try:
            # Cutting the text off at `end` keeps the spans right without moving them.
            groups[-1].append(parser().parse(source.text[:end], "member", start))
        except Unexpected as error:
            failure = Failure(source.text, start, end, error.position, error.expected)
            findings += run_rules("syntax", source, failure) or run_rules("syntax else", source, failure)
            if len(findings) >= MOST_SYNTAX_FINDINGS:
                break
    return Allocation(tuple(Group(tuple(members)) for members in groups if members)), findings


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of every member: `+` and `|` separate, but a `|` in parentheses does not."""
    start = depth = 0
    for match in re.finditer(r"[+|()]", text):
        match match[0]:
            case "(":
                depth += 1
            case ")":
                depth = max(0, depth - 1)
            case separator if separator == "+" or depth == 0:
                yield start, match.start()
                start, depth = match.end(), 0
    yield start, len(text)


@rule("ALLOC-EMPTY", "text", source=_LANGUAGE)
def empty(text: str) -> Iterator[Problem]:
    """An allocation names at least one engine."""
    if not text.strip():
        yield Problem("the allocation is empty", help="write for example `sglang:d4+megatron:d4`")


@rule("ALLOC-TOO-LONG", "text", source=_LANGUAGE)
def too_long(text: str) -> Iterator[Problem]:
    """A bound on the text keeps every answer fast; a real allocation is far below it."""
    if len(text) > LONGEST:
        yield Problem(
            f"the allocation has {len(text):,} characters; at most {LONGEST:,} are read",
            help="GPU ids can be written as ranges: `@0-7,16-23`",
        )


@rule("ALLOC-DOT-FORM", "syntax", source="AReaL 1.0 dropped `backend.layout` for `backend:layout`")
def dot_form(failure: Failure) -> Iterator[Problem]:
    """The older spelling with a dot is refused rather than guessed at: it could not name engines."""
    if match := _DOT.match(failure.member):
        yield Problem("the dot form was dropped", failure.whole, f"write `{match[1]}:{match[2]}`")


@rule("ALLOC-BACKEND-MISSING", "syntax", source=_LANGUAGE)
def backend_missing(failure: Failure) -> Iterator[Problem]:
    """Dimensions alone do not say which engine runs them."""
    if match := _DIMS.match(failure.member):
        dims = match[1].strip()
        yield Problem(
            f"`{dims}` has no backend", failure.whole, f"name the backend: `megatron:{dims}`, `sglang:{dims}`"
        )


@rule("ALLOC-PARENTHESIS", "syntax", source=_LANGUAGE)
def parenthesis(failure: Failure) -> Iterator[Problem]:
    """A folded layout stands in parentheses, or in the shell-safe spelling has `/` and no parentheses."""
    if "RPAR" in failure.expected:
        yield Problem("the `)` that closes the folded layout is missing", failure.here)
    elif "SLASH" in failure.expected:
        yield Problem(
            "a folded layout without parentheses needs `/ffn:` here",
            failure.here,
            "write `(attn:…|ffn:…)`, or `attn:…/ffn:…` without quotes in a shell",
        )
    elif re.match(r"\s*ffn\s*:", failure.text[failure.start :]) or re.match(r"\s*\(\s*ffn\b", _layout(failure)):
        yield Problem("`ffn` comes second in a folded layout", failure.whole, "write `(attn:…|ffn:…)`")


def _layout(failure: Failure) -> str:
    return failure.member.partition(":")[2]


@rule("ALLOC-SYNTAX", "syntax else", source=_LANGUAGE)
def unexpected(failure: Failure) -> Iterator[Problem]:
    """The text does not fit the grammar at this place; what would fit is named."""
    expected = [words for name, words in _TERMINALS.items() if name in failure.expected]
    if not failure.member.strip():
        yield Problem("an engine is missing here", failure.here, "write for example `megatron:d4`")
        return
    wanted = " or ".join(expected) or "nothing more"
    help = "a count is a positive integer, right after its letter: `d4`" if "DIM" in failure.expected else None
    if failure.position >= failure.end:
        yield Problem(f"the text ends where {wanted} should follow", failure.here)
    else:
        yield Problem(f"`{failure.text[failure.position]}` does not fit here; {wanted} would", failure.here, help)
