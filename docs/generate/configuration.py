"""Writes `docs/configuration.md`, every key of a run's YAML, from the schema."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from areal_like.core.config.keys import entries_of, members, section_of
from areal_like.core.config.schema import Ignored, RunConfig, Section

PAGE = Path(__file__).parents[1] / "configuration.md"

HEAD = """\
# Configuration of a run

Generated from `areal_like/core/config/schema/` by `python docs/generate/configuration.py`; do not edit.

A key is written `section.key`, and on the command line `section.key=value` after the options. `null` unsets an optional key. A key
that is set but ignored is reported as a warning. [run.md](run.md) describes how the sections work together. Keys that have the same
type, default and meaning in several sections are described in the first of them.
"""
MOST_USED = (
    "actor.path",
    "allocation_mode",
    "train_dataset.path",
    "train_dataset.batch_size",
    "gconfig.n_samples",
    "gconfig.max_new_tokens",
    "algorithm",
    "actor.optimizer.lr",
    "rollout.max_head_offpolicyness",
    "recover.mode",
)

_NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false", types.NoneType: "null", Any: "any"}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def page() -> str:
    """Return the page as Markdown."""
    chapters = "".join(_chapters(RunConfig, "", {}))
    names = [line.removeprefix("## ") for line in chapters.splitlines() if line.startswith("## ")]
    contents = " · ".join(f"[{name.strip('`')}](#{_anchor(name)})" for name in names)
    return f"{HEAD}\nSections: {contents}\n{_most_used()}{chapters}"


def _most_used() -> str:
    """Return the keys that most runs set."""
    rows = ""
    for key in MOST_USED:
        *sections, name = key.split(".")
        section: type[Section] | None = RunConfig
        for part in sections:
            section = section_of(section.model_fields[part].annotation) if section else None
        rows += _row(key, section.model_fields[name], section) if section else ""
    return f"\n## Most used keys\n\n| Key | Type | Default | Meaning |\n|---|---|---|---|\n{rows}"


def _anchor(title: str) -> str:
    """Return the anchor of a heading, as GitHub writes it."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def _chapters(
    section: type[Section], key: str, written: dict[str, str], may_be_null: bool = False, ignored: str = ""
) -> Iterator[str]:
    """Yield the section's own keys, then its sections. `written` holds the section of each row that the page has."""
    fields = section.model_fields
    rows = {name: _row(name, info, section) for name, info in fields.items() if not section_of(info.annotation)}
    title = f"`{key}`" if key else "The run"
    absent = " The section is absent by default." if may_be_null else ""
    yield f"\n## {title}\n\n{section.__doc__}{absent}{ignored}\n{_keys(key, rows, written)}"
    for name, info in fields.items():
        if inner := section_of(info.annotation):
            optional, ignored = (
                types.NoneType in members(info.annotation),
                "".join(map(" {}".format, _ignored(info, section))),
            )
            yield from _chapters(inner, f"{key}.{name}".lstrip("."), written, optional, ignored)
        elif entries := entries_of(info.annotation):
            yield from _chapters(entries, f"{key}.{name}.NAME".lstrip("."), written)


def _keys(key: str, rows: dict[str, str], written: dict[str, str]) -> str:
    """Return the rows of a section as a table, and links to earlier sections for those that the page has."""
    shared: dict[str, list[str]] = {}
    for name, row in rows.items():
        shared.setdefault(written.setdefault(row, key), []).append(name)
    own = {name for section, names in shared.items() if section == key or len(names) == 1 for name in names}
    table = "".join(row for name, row in rows.items() if name in own)
    text = f"\n| Key | Type | Default | Meaning |\n|---|---|---|---|\n{table}" if table else ""
    for section, names in shared.items():
        if not own.intersection(names):
            which = "All keys" if len(shared) == 1 else ", ".join(map("`{}`".format, names))
            text += f"\n{which} are described in [`{section}`](#{_anchor(section)}).\n"
    return text


def _row(name: str, info: FieldInfo, section: type[Section]) -> str:
    default = "required" if info.is_required() else f"`{_yaml(info.get_default(call_default_factory=True))}`"
    kinds = " or ".join(map(_type, members(info.annotation)))
    bounds = [
        f"{sign} {getattr(rule, bound)}"
        for rule in info.metadata
        for bound, sign in _BOUNDS.items()
        if getattr(rule, bound, None) is not None
    ]
    description = " ".join((info.description or "").split())  # a docstring of several lines
    meaning = " ".join([description, *_ignored(info, section)])
    cells = (f"`{name}`", ", ".join([kinds, *bounds]), default, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _ignored(info: FieldInfo, section: type[Section]) -> list[str]:
    """Return the conditions under which a key of `section` has no effect, as sentences, each once."""
    marks = [mark for mark in info.metadata if isinstance(mark, Ignored)]
    able = [mark for mark in marks if mark.reads is None or mark.reads in section.model_fields]
    return list(dict.fromkeys(f"Ignored if {mark.why}." for mark in able))


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        return _type(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) is dict:
        return "names with values"
    return "list" if get_origin(annotation) is list else _NAMES[annotation]


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")


if __name__ == "__main__":
    PAGE.write_text(page())
