"""The inputs of a command line: allocations, lines of standard input, or a run's YAML with overrides."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import allocation
from allocation.diagnostics import Finding
from allocation.plan import Plan

YAML = (".yaml", ".yml")
LABEL = 200


class UsageError(ValueError):
    """A combination of arguments that makes no sense."""


@dataclass(frozen=True)
class Case:
    """One checked input: its `label` in the output, its `text` (None: a file), and the result.

    `checked_with` lists the other definitions of a file, so that a missing model is not mistaken for a checked
    one.
    """

    label: str
    text: str | None
    findings: tuple[Finding, ...]
    plan: Plan | None
    checked_with: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON types."""
        return {
            "allocation": self.text,
            "file": self.label if self.text is None else None,
            "valid": self.plan is not None,
            "n_gpus": self.plan.n_gpus if self.plan else None,
            "findings": [finding.to_json() for finding in self.findings],
            "plan": self.plan.to_json() if self.plan else None,
        }


def cases(words: Sequence[str], **options: Any) -> list[Case]:
    """Return one checked case per allocation or YAML. Options that are None are not checked. Raises `UsageError`."""
    given = {name: value for name, value in options.items() if value is not None}
    found = []
    for label, text, overrides in _list_inputs(words):
        if text is not None:
            result = allocation.check(text, **given)
            found.append(Case(label, text, result.findings, result.plan))
        elif given:
            raise UsageError(f"{label} sets {', '.join(given)}; change it with key=value after the file")
        else:
            found.append(_file(label, overrides))
    return found


def one(words: Sequence[str], **options: Any) -> Case:
    """Return the only case of `words`. Raises `UsageError` when there are none or several."""
    found = cases(words, **options)
    if len(found) != 1:
        raise UsageError(f"this command takes one allocation, not {len(found)}; quote a string with blanks")
    return found[0]


def no_files(command: str, words: Sequence[str]) -> None:
    """Raise `UsageError` if a file is given to a command that takes none."""
    if any(map(_is_file, words)):
        raise UsageError(f"{command} takes strings, not files")


def _is_file(word: str) -> bool:
    """Return whether a word names a run's YAML; an override's value may end like one."""
    return word.endswith(YAML) and ("=" not in word or os.path.exists(word))


def texts(words: Sequence[str]) -> list[str]:
    """Return the allocations among the words, unchecked. Raises `UsageError`."""
    no_files("format", words)
    return [text for _, text, _ in _list_inputs(words) if text is not None]


def _list_inputs(words: Sequence[str]) -> list[tuple[str, str | None, list[str]]]:
    """Return label, text (None: the label is a file) and overrides of everything that the words name."""
    files = [word for word in words if _is_file(word)]
    overrides = [word for word in words if "=" in word and word not in files]
    if overrides and not files:
        raise UsageError(f"{overrides[0]!r} overrides a run's YAML; name the YAML file before it")
    found: list[tuple[str, str | None, list[str]]] = []
    for word in words:
        if word in files:
            found.append((word, None, overrides))
        elif word not in overrides:
            found += [(_label(text), text, []) for text in (_lines() if word == "-" else [word])]
    return found


def _lines() -> list[str]:
    lines = [line.strip() for line in sys.stdin if line.strip()]
    if not lines:
        raise UsageError("standard input contains no allocation")
    return lines


def _label(text: str) -> str:
    shown = "".join(c if c.isprintable() else " " for c in text[:LABEL])
    return shown if len(text) <= LABEL else f"{shown}…"


def _file(file: str, overrides: Sequence[str]) -> Case:
    from allocation.readers import FileError, read_file

    try:
        read = read_file(file, overrides)
    except FileError as error:
        raise UsageError(str(error)) from error
    return Case(file, None, read.findings, read.plan, read.checked_with)
