"""Checks of the keys and types of a configuration, reported in terms of its keys."""

import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from allocation.diagnostics import Finding
from areal_like.core.config.findings import finding, nearest_keys, nearest_words
from areal_like.core.config.keys import (
    MASK,
    all_keys,
    annotation_of,
    entries_of,
    is_below,
    is_secret,
    members,
    section_of,
    takes_text,
    value_at,
)
from areal_like.core.config.schema import RunConfig, Section
from areal_like.core.registry import find_modules

_ABSENT = "???"  # OmegaConf's mark of a value that is left open
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_UNKNOWN_KEY, _MISSING_KEY = "CONFIG-UNKNOWN-KEY", "CONFIG-MISSING"
_UNKNOWN_KEYS = (_UNKNOWN_KEY, "CONFIG-REMOVED-KEY")
_REPLACED = {  # keys of earlier versions, their successors, and the new values
    "rollout.partial_rollout": (
        "weight_update.requests",
        "write weight_update.requests=drain for false, or recompute for true; in_place costs least",
    )
}
_REMOVED = {  # keys of earlier versions, and why there is nothing in their place
    "rollout.client_processes": "the controller reads 3.5 M tokens per second by itself, more than the servers of a run make",
    "rollout.max_servers": "a run has the servers of its layout; start it again with a larger layout, and it resumes",
}
_EXPECTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "model_type": "a section of keys",
    "dict_type": "a section of keys",
    "string_pattern_mismatch": "letters, digits, `_`, `.` and `-` only, and begin with neither `.` nor `-`",
}


def validate(values: dict[str, Any]) -> tuple[RunConfig | None, list[Finding]]:
    """Return the configuration of nested mappings, or one finding per key that is missing or has a wrong value."""
    try:
        return RunConfig.model_validate(values), []
    except ValidationError as error:
        by_key: dict[str, list[ErrorDetails]] = {}  # pydantic reports each alternative of a union on its own
        for problem in error.errors(include_url=False, include_context=False):
            if problem["type"] != "extra_forbidden":
                by_key.setdefault(_key_of(problem, values), []).append(problem)
        return None, [_objection(key, problems) for key, problems in by_key.items()]


def first_causes(findings: Sequence[Finding], data: dict[str, Any]) -> list[Finding]:
    """Return the findings without consequences of other ones.

    A key is not missing that a misspelt one may have meant or that was refused, and a reference `${...}` to a key of
    another finding is not wrong by itself.
    """
    meant = {key for found in findings if found.code in _UNKNOWN_KEYS for key in found.nearest}
    wrong = meant | {str(found.key) for found in findings}
    others = [str(found.key) for found in findings if found.code != _MISSING_KEY]

    def follows(found: Finding) -> bool:
        key = str(found.key)
        if found.code == _MISSING_KEY and (key in meant or is_below(others, key)):
            return True
        return any(target in wrong - {key} for target in _REFERENCE.findall(str(value_at(data, key))))

    causes = [found for found in findings if not follows(found)]
    return list(dict.fromkeys(causes or findings))


def unknown_key(key: str, *, dotted: bool = False) -> Finding:
    """Return the finding of an unknown key, or of one `dotted` in a file; `nearest` are keys that may be meant."""
    message, help = "unknown key", None
    if key in _REPLACED:
        new, help = _REPLACED[key]
        return finding("CONFIG-REMOVED-KEY", key, f"this key was replaced by {new}", help)
    if key in _REMOVED:
        return finding("CONFIG-REMOVED-KEY", key, f"this key was removed: {_REMOVED[key]}", f"remove {key}")
    if capability := _owners().get(key):
        folder = f"areal_like/capabilities/{capability}"
        message, help = f"this key belongs to {folder}, which is not there", f"remove {key}, or restore {folder}"
        return finding("CONFIG-REMOVED-KEY", key, message, help)
    if dotted:
        section, _, leaf = key.rpartition(".")
        message = "keys in a file must be nested, not dotted"
        help = f"write `{leaf}: ...` in the section {section}, indented"
    if help is None and (known := _explain_foreign(key)):
        return finding(_UNKNOWN_KEY, key, message, known[0], nearest=[known[1]] if known[1] else ())
    return finding(_UNKNOWN_KEY, key, message, help, nearest=nearest_keys(key, [*_siblings(key), *all_keys()]))


def _explain_foreign(key: str) -> tuple[str, str | None] | None:
    """Explain a key of another system in a sentence, and name our key, if a folder knows it."""
    found = (explain(key) for _, module in find_modules("foreign_keys") for explain in module.FOREIGN_KEYS)
    return next(filter(None, found), None)


@cache
def _owners() -> dict[str, str]:
    """Return the capability of each key that one adds, also of capabilities that were deleted."""
    keys = tomllib.loads(Path(__file__).with_name("capability_keys.toml").read_text())
    return {key: name for name, own in keys.items() for key in own["keys"]}


def _siblings(key: str) -> Iterator[str]:
    """Yield the keys of the section that `key` would be in, which may be an entry of a user's name."""
    place = key.rpartition(".")[0]
    section = section_of(annotation_of(place)) if place else None
    yield from (f"{place}.{name}" for name in (section.model_fields if section else ()))


def _missing_key(key: str) -> Finding:
    if section_of(annotation_of(key)):
        return finding(_MISSING_KEY, key, "this section is missing", f"write `{key}:` and its keys in the file")
    return finding(_MISSING_KEY, key, "this key must be set", f"write {key}=... or set it in the file")


def wrong_keys(data: dict[str, Any], section: type[Section] | None = RunConfig, prefix: str = "") -> Iterator[Finding]:
    """Yield names that the schema does not have, and values that are left open as `???`."""
    for name, value in data.items():
        key, field = prefix + name, section.model_fields.get(name) if section else None
        if section is not None and field is None:
            yield unknown_key(key, dotted="." in name)
        elif value == _ABSENT:
            yield _missing_key(key)
        elif field and (entries := entries_of(field.annotation)) and isinstance(value, dict):
            for name, entry in value.items():
                yield from wrong_keys(entry, entries, f"{key}.{name}.") if isinstance(entry, dict) else ()
        elif isinstance(value, dict):
            yield from wrong_keys(value, section_of(field.annotation) if field else None, f"{key}.")


def _key_of(problem: ErrorDetails, values: Any) -> str:
    """Return the key of pydantic's error, without the suffix for an alternative of a union."""
    if problem["type"] == "missing":
        return ".".join(map(str, problem["loc"]))
    key = ""
    for part in problem["loc"]:
        if not isinstance(values, dict) or part not in values:
            break
        key, values = f"{key}.{part}", values[part]
    return key.lstrip(".")


def _objection(key: str, problems: Sequence[ErrorDetails]) -> Finding:
    if any(problem["type"] == "missing" for problem in problems):
        return _missing_key(key)
    annotation, value = annotation_of(key), problems[0]["input"]
    choices = [choice for member in members(annotation) for choice in get_args(member) if isinstance(choice, str)]
    said = [problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ") for problem in problems]
    expected = [_EXPECTED.get(problem["type"], words) for problem, words in zip(problems, said, strict=True)]
    if type(None) in members(annotation):
        expected.append("null")
    unquoted = isinstance(value, int | float) and takes_text(annotation)
    if is_secret(key):
        value, unquoted = MASK, False
    message = f"{value!r} should be {' or '.join(dict.fromkeys(expected))}"
    help = f'write it in quotes: "{value}"' if unquoted else None
    return finding("CONFIG-VALUE", key, message, help, nearest=nearest_words(value, choices))


def check_adapters(config: RunConfig) -> Iterator[Finding]:
    """Yield unknown keys and wrong values in the sections of adapters."""
    values = config.model_dump()
    for name, adapter in config.adapters.items():
        own = adapter.merge_into(values)
        yield from at_adapter(config, name, [*wrong_keys(own), *validate(own)[1]])


def at_adapter(config: RunConfig, name: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield findings about a run with one adapter alone, at the adapter's keys where it has sections of its own.

    With the name "" the findings are about a run without several adapters.
    """
    own = config.adapters[name].model_fields_set if name else ()

    def place(key: str) -> str:
        return f"adapters.{name}.{key}" if key.partition(".")[0] in own else key

    for found in findings:
        key = found.key and " + ".join(map(place, found.key.split(" + ")))
        yield replace(found, source=replace(found.source, key=key))
