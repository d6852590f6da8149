"""Options of a library that users may set by name, from a table that was written when its version was pinned.

`requirements/option_tables.py` writes the tables, so that a configuration is checked without importing the library.
"""

import functools
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Len
from pydantic import TypeAdapter, ValidationError

from allocation.diagnostics import Finding
from areal_like.core.config.findings import finding, nearest_words

_KINDS: dict[str, Any] = {
    "null": None,
    "true or false": bool,
    "a whole number": int,
    "a number": float,
    "text": str,
    "a list": list,
    "a list of 2": Annotated[list[Any], Len(2, 2)],
    "a list of whole numbers": list[int],
    "a list of numbers": list[float],
    "a list of strings": list[str],
}


@dataclass(frozen=True)
class Option:
    """One option: the field of the library that it sets, and the types and choices of its values, in a user's words."""

    field: str
    types: tuple[str, ...] = ()
    choices: tuple[Any, ...] = ()

    def mismatch(self, value: Any) -> str | None:
        """Return the expected kind of value, or None if `value` fits."""
        chosen = any(value == choice and type(value) is type(choice) for choice in self.choices)
        if chosen or any(_is_of(kind, value) for kind in self.types):
            return None
        choices = [f"one of {', '.join(map(str, self.choices))}"] if self.choices else []
        return " or ".join([*choices, *self.types])

    def nearest(self, value: Any) -> tuple[str, ...]:
        """Return the choice closest to `value`."""
        return tuple(nearest_words(value, map(str, self.choices)))


def _is_of(kind: str, value: Any) -> bool:
    try:
        TypeAdapter(_KINDS[kind]).validate_python(value, strict=True)
    except (KeyError, ValidationError):  # no value of YAML is a function
        return False
    return True


@dataclass(frozen=True)
class OptionProblem:
    """Why option `name` cannot be set as it is; `code` is the finding's.

    `names` are options and `values` values that may have been meant.
    """

    code: str
    name: str
    message: str
    help: str | None = None
    names: tuple[str, ...] = ()
    values: tuple[str, ...] = ()


@functools.cache
def read_options(table: Path) -> Mapping[str, Option]:
    """Return the options of a table by name."""
    rows: dict[str, dict[str, Any]] = json.loads(table.read_text(encoding="utf-8"))
    return {
        name: Option(row.get("field", name), tuple(row.get("types", ())), tuple(row.get("choices", ())))
        for name, row in rows.items()
    }


@functools.cache
def read_rules(table: Path) -> Mapping[str, Any]:
    """Return the names of options by how a run treats them, which are beside their table."""
    return tomllib.loads(table.with_name("option_rules.toml").read_text(encoding="utf-8"))


def option_finding(section: str, problem: OptionProblem) -> Finding:
    """Return a finding about an option that a section passes on."""
    nearest = (*(f"{section}.{name}" for name in problem.names), *problem.values)
    return finding(problem.code, f"{section}.{problem.name}", problem.message, problem.help, nearest=nearest)
