"""Text to syntax tree with findings instead of an exception, and all syntax errors in one pass."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from allocation.diagnostics import AllocationError, Finding, Source, Span
from allocation.language import parser
from allocation.language.parser import Unexpected
from allocation.language.syntax import Allocation, Group, Member
from allocation.registry import run_rules

MOST_SYNTAX_FINDINGS = 20


@dataclass(frozen=True, slots=True)
class GrammarFailure:
    """A member of `text`, between `start` and `end`, that violates the grammar at `position`."""

    text: str
    start: int
    end: int
    position: int
    expected: frozenset[str]

    @property
    def member(self) -> str:
        """The text of the member alone."""
        return self.text[self.start : self.end]

    @property
    def whole(self) -> tuple[Span, ...]:
        """The span of the member, without surrounding blanks."""
        text = self.member
        return (Span(self.end - len(text.lstrip()), self.start + len(text.rstrip())),)

    @property
    def here(self) -> tuple[Span, ...]:
        """The first character (or the end) that violates the grammar."""
        return (Span(self.position, min(self.position + 1, max(self.end, self.position))),)


def read(source: Source) -> tuple[Allocation, list[Finding]]:
    """Return the tree of `source.text` and its syntax findings; with findings, the tree holds the valid members
    only."""
    if findings := run_rules(source, text=source.text):
        return Allocation(()), findings
    try:
        return parser.parse(source.text, "allocation", 0, len(source.text)), []
    except Unexpected:
        return _read_members(source)


def parse(text: str) -> Allocation:
    """Return the syntax tree of a whole allocation. Raises `AllocationError` with every syntax finding.

    Words are not judged: an unknown backend or letter parses.
    """
    tree, findings = read(Source(text))
    if findings:
        raise AllocationError(findings)
    return tree


def _read_members(source: Source) -> tuple[Allocation, list[Finding]]:
    """Read each member separately, so that one syntax error does not hide the others."""
    groups: list[list[Member]] = [[]]
    findings: list[Finding] = []
    for start, end in pieces(source.text):
        if start and source.text[start - 1] == "+":
            groups.append([])
        try:
            groups[-1].append(parser.parse(source.text, "member", start, end))
        except Unexpected as error:
            failure = GrammarFailure(source.text, start, end, error.position, error.expected)
            findings += run_rules(source, failure=failure) or run_rules(source, unexplained=failure)
            if len(findings) >= MOST_SYNTAX_FINDINGS:
                break
    return Allocation(tuple(Group(tuple(members)) for members in groups if members)), findings


def pieces(text: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of every member:

    `+` and `|` separate members, except a `|` in parentheses or before `ffn:`.
    """
    start = depth = 0
    for match in re.finditer(r"[+()]|\|(?!\s*ffn\s*:)", text):
        match match[0]:
            case "(":
                depth += 1
            case ")":
                depth = max(0, depth - 1)
            case separator if separator == "+" or depth == 0:
                yield start, match.start()
                start, depth = match.end(), 0
    yield start, len(text)
