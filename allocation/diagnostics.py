"""Findings: errors, warnings and notes about an allocation, as values, and their display."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from typing import Any, NamedTuple

WIDTH = 80


class Span(NamedTuple):
    """Characters `start` to `end` (exclusive, from 0) of a text."""

    start: int
    end: int


class Severity(StrEnum):
    """`ERROR`: no plan is made. `WARNING`: the plan works, but the user should know. `NOTE`: information."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Source:
    """A checked text and, if it comes from a config field, the key of that field (`actor.backend`).

    Several keys are joined by ` + `; `places` says where each of them was set (`run.yaml:12`), if known.
    """

    text: str
    key: str | None = None
    places: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Remedy:
    """Settings with which a finding does not arise, by the names in `allocation.settings`; `rest` ends the sentence."""

    settings: tuple[tuple[str, Any], ...]
    rest: str = ""

    def text(self, spell: Callable[[str, str], str] = "{}={}".format) -> str:
        """Return the sentence; `spell` returns a setting and its value as the user writes them."""
        values = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in self.settings}
        return f"write {' '.join(spell(name, value) for name, value in values.items())}{self.rest}"


@dataclass(frozen=True, slots=True)
class Problem:
    """The result of a rule: one sentence, the spans in question, and the fix, in words or as settings.

    `source` is the text of the spans, if it is not the text that the rule runs on; `roles` are the roles in question,
    if they are not the one that the rule runs on; `quoted` are the whole allocations that `help` suggests.
    """

    message: str
    spans: tuple[Span, ...] = ()
    help: str | None = None
    source: Source | None = None
    remedy: Remedy | None = None
    roles: tuple[str, ...] = ()
    quoted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation of one rule.

    `spans` index `source.text`, the most important one first. `nearest` are whole strings, closest first, that were
    checked and are valid. `roles` are the roles in question, if they are known; `help` is `remedy` in words, if the
    fix is a setting, and suggests the whole allocations `quoted`.
    """

    code: str
    severity: Severity
    message: str
    source: Source
    spans: tuple[Span, ...] = ()
    help: str | None = None
    megatron: str | None = None
    nearest: tuple[str, ...] = ()
    remedy: Remedy | None = None
    roles: tuple[str, ...] = field(default=(), compare=False)
    quoted: tuple[str, ...] = field(default=(), compare=False)

    @property
    def key(self) -> str | None:
        """The config key of the text, if it came from one."""
        return self.source.key

    @property
    def where(self) -> str:
        """The key with its place: `actor.backend (run.yaml:12)`."""
        keys = (self.key or "").split(" + ")
        return " + ".join(f"{key} ({place})" if place else key for key, place in zip_longest(keys, self.source.places))

    @property
    def span(self) -> Span | None:
        """The most important span of the finding."""
        return self.spans[0] if self.spans else None

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON types."""
        return {
            "code": self.code,
            "severity": self.severity.value,
            "message": self.message,
            "text": self.source.text,
            "key": self.key,
            "place": " + ".join(self.source.places) or None,
            "spans": [list(span) for span in self.spans],
            "help": self.help,
            "megatron": self.megatron,
            "nearest": list(self.nearest),
        }

    def __str__(self) -> str:
        return render(self)


class AllocationError(ValueError):
    """Raised for an allocation with errors; `findings` holds all findings, warnings included."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("\n\n".join(map(str, self.findings)))


def has_errors(findings: Iterable[Finding]) -> bool:
    """Return whether a finding rules out a plan."""
    return any(finding.severity is Severity.ERROR for finding in findings)


def render(finding: Finding) -> str:
    """Return the finding as plain text of at most about 80 columns, with the place in the string underlined."""
    where = f" in {finding.where}" if finding.key else ""
    lines = [f"{finding.severity}[{finding.code}]{where}: {finding.message}"]
    lines += _excerpt(finding.source.text, finding.spans)
    if finding.help:
        lines.append(f"  help: {finding.help}")
    if finding.megatron:
        lines.append(f"  Megatron's name: {finding.megatron}")
    if finding.nearest:
        lines.append("  nearest valid: " + "\n                 ".join(finding.nearest))
    return "\n".join(lines)


def _excerpt(text: str, spans: tuple[Span, ...]) -> list[str]:
    """Return the part of `text` around the first span, `^` under it and `~` under the other spans."""
    if not spans:
        return []
    width = WIDTH - 8
    first = spans[0]
    start = max(0, min(first.start - width // 2, len(text) + 1 - width)) if len(text) > width else 0
    end = min(len(text), start + width)
    marks = [" "] * (end + 1 - start)
    for mark, group in (("~", spans[1:]), ("^", spans[:1])):
        for span in group:
            for index in range(max(span.start, start), min(max(span.end, span.start + 1), end + 1)):
                marks[index - start] = mark
    shown = "".join(c if c.isprintable() else " " for c in text[start:end])
    before, after = "…" if start else "", "…" if end < len(text) else ""
    return [f"    {before}{shown}{after}", ("    " + " " * len(before) + "".join(marks)).rstrip()]
