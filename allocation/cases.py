"""What the words of a command line ask about: allocations, lines of standard input, a run's YAML with overrides."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import allocation
from allocation.compiler import Result
from allocation.diagnostics import Finding, has_errors

if TYPE_CHECKING:
    from allocation.run_file import RunFile

YAML = (".yaml", ".yml")
LABEL = 200


class UsageError(ValueError):
    """The words make no sense together."""


@dataclass(frozen=True)
class Case:
    """One thing to check: its `label` in the output, and the arguments of `allocation.check`."""

    label: str
    arguments: dict[str, Any]
    run: RunFile | None = None

    def check(self) -> Result:
        """All findings, the file's own first; no plan when one of them is an error."""
        first = self.run.findings if self.run else ()
        found = allocation.check(**self.arguments) if "spec" in self.arguments else Result((), None)
        return Result((*first, *found.findings), None if has_errors(first) else found.plan)

    def located(self, finding: Finding) -> Finding:
        """The finding with the YAML's line."""
        return self.run.locate(finding) if self.run else finding

    def place(self, finding: Finding) -> str | None:
        """The YAML's line alone."""
        return self.run.place(finding) if self.run else None


def cases(words: Sequence[str], **options: Any) -> list[Case]:
    """One case per allocation or YAML; options that are None leave it to the YAML. Raises `UsageError`."""
    given = {name: value for name, value in options.items() if value is not None}
    files = [word for word in words if word.endswith(YAML)]
    overrides = [word for word in words if "=" in word and word not in files]
    if overrides and not files:
        raise UsageError(f"{overrides[0]!r} overrides a run's YAML, and none is named")
    found = []
    for word in words:
        if word in files:
            run = _run_file(word, overrides)
            found.append(Case(word, run.arguments | given, run))
        elif word not in overrides:
            found += [Case(_label(text), {"spec": text, **given}) for text in (_lines() if word == "-" else [word])]
    return found


def one(words: Sequence[str], **options: Any) -> Case:
    """The only case of `words`. Raises `UsageError` when there are none or several."""
    found = cases(words, **options)
    if len(found) != 1:
        raise UsageError(f"one allocation is needed here, not {len(found)}; a string with blanks needs quotes")
    return found[0]


def _lines() -> list[str]:
    lines = [line.strip() for line in sys.stdin if line.strip()]
    if not lines:
        raise UsageError("standard input has no allocation")
    return lines


def _label(text: str) -> str:
    shown = "".join(c if c.isprintable() else " " for c in text[:LABEL])
    return shown if len(text) <= LABEL else f"{shown}…"


def _run_file(word: str, overrides: Sequence[str]) -> RunFile:
    from allocation.run_file import RunFileError, read_run_file

    try:
        return read_run_file(word, overrides)
    except RunFileError as error:
        raise UsageError(str(error)) from error
