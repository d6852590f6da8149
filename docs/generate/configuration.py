"""Writes `docs/configuration.md`, every key of a run's YAML, from the schema."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from areal_like.config.keys import entries_of, members, section_of
from areal_like.config.schema import RunConfig, Section

PAGE = Path(__file__).parents[1] / "configuration.md"

HEAD = """\
# Configuration of a run

Generated from `areal_like/config/schema/` by `python docs/generate/configuration.py`; do not edit.

A key is written `section.key`; on the command line `section.key=value` after the options. `null` unsets a key that may be
empty. [run.md](run.md) says what the sections mean together.
"""

_NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false", types.NoneType: "null", Any: "any"}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def page() -> str:
    """The page as Markdown."""
    return HEAD + "".join(_chapters(RunConfig, ""))


def _chapters(section: type[Section], key: str, may_be_null: bool = False) -> Iterator[str]:
    """The section's own keys as a table, then its sections."""
    fields = section.model_fields
    rows = "".join(_row(name, info) for name, info in fields.items() if not section_of(info.annotation))
    title = f"`{key}`" if key else "The run"
    absent = " It is absent unless it is written." if may_be_null else ""
    yield f"\n## {title}\n\n{section.__doc__}{absent}\n\n| Key | Type | Default | Meaning |\n|---|---|---|---|\n{rows}"
    for name, info in fields.items():
        if inner := section_of(info.annotation):
            yield from _chapters(inner, f"{key}.{name}".lstrip("."), types.NoneType in members(info.annotation))
        elif entries := entries_of(info.annotation):
            yield from _chapters(entries, f"{key}.{name}.NAME".lstrip("."))


def _row(name: str, info: FieldInfo) -> str:
    default = "required" if info.is_required() else f"`{_yaml(info.get_default(call_default_factory=True))}`"
    kinds = " or ".join(map(_type, members(info.annotation)))
    bounds = [
        f"{sign} {getattr(rule, bound)}"
        for rule in info.metadata
        for bound, sign in _BOUNDS.items()
        if getattr(rule, bound, None) is not None
    ]
    cells = (f"`{name}`", ", ".join([kinds, *bounds]), default, info.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) is dict:
        return "names with values"
    return "list" if get_origin(annotation) is list else _NAMES[annotation]


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")


if __name__ == "__main__":
    PAGE.write_text(page())
