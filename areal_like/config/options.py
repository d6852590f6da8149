"""Options of a library that users may set by name, from a table that was written when its version was pinned.

`requirements/option_tables.py` writes the tables, so that a configuration is checked without importing the library.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.config.findings import nearest_words


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_whole(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(item, value))


_FITS: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "true or false": lambda value: isinstance(value, bool),
    "a whole number": _is_whole,
    "a number": _is_number,
    "text": _is_text,
    "a list": _list_of(lambda _: True),
    "a list of 2": lambda value: isinstance(value, list) and len(value) == 2,
    "a list of whole numbers": _list_of(_is_whole),
    "a list of numbers": _list_of(_is_number),
    "a list of texts": _list_of(_is_text),
}


@dataclass(frozen=True)
class Option:
    """One option: the field of the library that it sets, and the types and choices of its values, in a user's words."""

    field: str
    types: tuple[str, ...] = ()
    choices: tuple[Any, ...] = ()

    def expected(self, value: Any) -> str | None:
        """What the option's value should be; None where `value` is that."""
        fits = any(value == choice and type(value) is type(choice) for choice in self.choices)
        if fits or any(_FITS.get(kind, lambda _: False)(value) for kind in self.types):
            return None
        choices = [f"one of {', '.join(map(str, self.choices))}"] if self.choices else []
        return " or ".join([*choices, *self.types])

    def nearest(self, value: Any) -> tuple[str, ...]:
        """The choice that is most like `value`."""
        return tuple(nearest_words(value, map(str, self.choices)))


@dataclass(frozen=True)
class OptionProblem:
    """Why option `name` cannot be set as it is; `names` are options and `values` values that may have been meant."""

    name: str
    message: str
    help: str | None = None
    names: tuple[str, ...] = ()
    values: tuple[str, ...] = ()


@functools.cache
def read_options(table: Path) -> Mapping[str, Option]:
    """The options of a table, by name."""
    rows: dict[str, dict[str, Any]] = json.loads(table.read_text(encoding="utf-8"))
    return {
        name: Option(row.get("field", name), tuple(row.get("types", ())), tuple(row.get("choices", ())))
        for name, row in rows.items()
    }
