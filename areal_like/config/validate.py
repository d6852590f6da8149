"""Values in, a `RunConfig` out that lacks what is wrong with them, and everything that is wrong."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from allocation.diagnostics import Finding, Severity, Source
from areal_like.config.findings import ConfigError, nearest_keys, nearest_words
from areal_like.config.keys import all_keys, annotation_of, is_below, members, section_of, takes_text, value_at
from areal_like.config.schema import PATH, RunConfig, Section, expand_home

_ABSENT = "???"  # OmegaConf's mark; what refers to it is InterpolationToMissingValueError's
_UNKNOWN_KEY, _MISSING_KEY = "CONFIG-UNKNOWN-KEY", "CONFIG-MISSING"
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


def validate(data: dict[str, Any], findings: Iterable[Finding] = ()) -> tuple[RunConfig, list[Finding]]:
    """The configuration that nested mappings hold, and what is wrong with it, after the `findings` there are already.

    Each key that a finding is about is left out, and so are the keys that a misspelt one may have meant and those that
    refer to one of these with `${...}`: asking the configuration for them raises UnknownSetting. So nothing is said
    here or by later checks that only follows from another finding. Raises ConfigError if a reference is so wrong that
    it cannot be left out.
    """
    said = list(dict.fromkeys([*findings, *_wrong_keys(data)]))
    unknown: set[str] = set()
    while True:
        meant = {key for finding in said if finding.code == _UNKNOWN_KEY for key in finding.nearest}
        unknown |= {str(finding.key) for finding in said} | {key for key in meant if value_at(data, key) is None}
        try:
            values = _resolve(data, unknown)
        except OmegaConfBaseException as error:
            finding = _wrong_reference(error)
            if finding.key in unknown:
                raise ConfigError(dict.fromkeys([*said, finding])) from error
            if unknown and isinstance(error, InterpolationToMissingValueError):
                unknown.add(str(finding.key))
            else:
                said.append(finding)
            continue
        new = [f for f in _objections(_present(values)) if f not in said and not _follows(f, unknown)]
        if new:
            said += _first_causes(new, data)
        elif meant <= unknown:
            return _construct(RunConfig, values) if unknown else RunConfig.model_validate(values), said
        else:
            unknown |= meant  # only now, as what is written there may be wrong too


def unknown_key(key: str) -> Finding:
    """There is no such key; the finding's `nearest` are keys that may have been meant."""
    return _finding(_UNKNOWN_KEY, key, "there is no such key", nearest=nearest_keys(key, all_keys()))


def plain(tree: DictConfig, *, resolve: bool = False) -> dict[str, Any]:
    """A configuration as plain mappings of texts to values, with `${...}` replaced if `resolve`."""
    return _with_text_keys(cast("dict[Any, Any]", OmegaConf.to_container(tree, resolve=resolve)))


def _with_text_keys(values: dict[Any, Any]) -> dict[str, Any]:
    return {str(key): _with_text_keys(value) if isinstance(value, dict) else value for key, value in values.items()}


def first_line(error: Exception) -> str:
    """The first line of an error's text."""
    return str(error).strip().splitlines()[0]


def _dotted_key(key: str) -> Finding:
    section, _, leaf = key.rpartition(".")
    help = f"write `{leaf}: ...` in the section {section}, indented"
    return _finding(_UNKNOWN_KEY, key, "a file's keys are nested, not dotted", help, nearest_keys(key, all_keys()))


def _missing_key(key: str) -> Finding:
    if section_of(annotation_of(key)):
        return _finding(_MISSING_KEY, key, "this section must be there", f"write `{key}:` and its keys in the file")
    return _finding(_MISSING_KEY, key, "this key must be set", f"write {key}=... or set it in the file")


def _wrong_keys(data: dict[str, Any], section: type[Section] | None = RunConfig, prefix: str = "") -> Iterator[Finding]:
    """Names that the schema does not have, and values that are left open as `???`."""
    for name, value in data.items():
        key, field = prefix + name, section.model_fields.get(name) if section else None
        if section is not None and field is None:
            yield _dotted_key(key) if "." in name else unknown_key(key)
        elif value == _ABSENT:
            yield _missing_key(key)
        elif isinstance(value, dict):
            yield from _wrong_keys(value, section_of(field.annotation) if field else None, f"{key}.")


def _finding(code: str, key: str, message: str, help: str | None = None, nearest: Iterable[str] = ()) -> Finding:
    return Finding(code, Severity.ERROR, message, Source("", key), help=help, nearest=tuple(nearest))


def _follows(finding: Finding, unknown: Iterable[str]) -> bool:
    """Whether a key is missing only because it, or something in it, was left out."""
    return finding.code == _MISSING_KEY and is_below(unknown, str(finding.key))


def _first_causes(findings: list[Finding], data: dict[str, Any]) -> list[Finding]:
    """Those about values that are written where they are, if any: what is wrong elsewhere may be one of these."""
    return [finding for finding in findings if "${" not in str(value_at(data, str(finding.key)))] or findings


def _resolve(data: dict[str, Any], unknown: Iterable[str]) -> dict[str, Any]:
    """Replace `${...}` by what it refers to, and mark the unknown keys as absent; raises OmegaConfBaseException."""
    known = copy.deepcopy(data)
    for key in unknown:
        _leave_out(known, key)
    values = plain(OmegaConf.create(known), resolve=True)
    values["trial_name"] = values.get("trial_name") or time.strftime("%Y%m%d-%H%M%S")
    return values


def _wrong_reference(error: OmegaConfBaseException) -> Finding:
    key = str(getattr(error, "full_key", None) or "").partition("[")[0]  # a list is one value
    help = "refer to a key by its full dotted name, such as ${gconfig.n_samples}"
    return _finding("CONFIG-REFERENCE", key, first_line(error), help)


def _leave_out(values: dict[str, Any], key: str, section: type[Section] | None = RunConfig) -> None:
    """Mark a key as absent, or the optional section around it if that is not there."""
    name, _, rest = key.partition(".")
    if rest:
        values.pop(key, None)  # a dotted key
    field = section.model_fields.get(name) if section else None
    if field and isinstance(field.default, Section):
        values.setdefault(name, {})
    if rest and isinstance(values.get(name), dict):
        _leave_out(values[name], rest, section_of(field.annotation) if field else None)
    else:
        values[name] = _ABSENT


def _present(values: dict[str, Any]) -> dict[str, Any]:
    """Nested mappings without what is marked as absent."""
    return {
        name: _present(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if value != _ABSENT
    }


def _construct[S: Section](section: type[S], values: dict[str, Any]) -> S:
    """A section of valid values that knows nothing of those marked as absent."""
    known = _present(values)
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None and isinstance(known.get(name), dict):
            known[name] = _construct(inner, values[name])
        elif PATH in field.metadata and name in known:  # a model that is constructed is not validated
            known[name] = expand_home(known[name])
    made = cast("S", section.model_construct(**known))  # which the pydantic plugin types as the base class
    for name in values.keys() - known.keys():
        made.__dict__.pop(name, None)
    return made


def _objections(values: dict[str, Any]) -> list[Finding]:
    """One finding per key that pydantic objects to; it reports each alternative of a union on its own."""
    try:
        RunConfig.model_validate(values)
    except ValidationError as error:
        by_key: dict[str, list[ErrorDetails]] = {}
        for problem in error.errors(include_url=False, include_context=False):
            parts = _location(problem["loc"], values, missing=problem["type"] == "missing")
            by_key.setdefault(".".join(parts), []).append(problem)
        return [_objection(key, problems) for key, problems in by_key.items()]
    return []


def _location(parts: tuple[int | str, ...], values: Any, *, missing: bool) -> Iterator[str]:
    """The keys of a pydantic location; what it appends for an alternative of a union is left out."""
    for index, part in enumerate(parts):
        inside = isinstance(values, dict) and part in values
        if not inside and not (missing and index == len(parts) - 1):
            return
        yield str(part)
        values = values[part] if inside else None


def _expectation(message: str) -> str:
    return message.removeprefix("Input should be ").removeprefix("Value error, ")


def _objection(key: str, problems: Sequence[ErrorDetails]) -> Finding:
    if any(problem["type"] == "missing" for problem in problems):
        return _missing_key(key)
    annotation, value = annotation_of(key), problems[0]["input"]
    choices = [choice for member in members(annotation) for choice in get_args(member) if isinstance(choice, str)]
    expected = [_EXPECTED.get(problem["type"]) or _expectation(problem["msg"]) for problem in problems]
    if type(None) in members(annotation):
        expected.append("null")
    help = None
    if isinstance(value, int | float) and takes_text(annotation):
        help = f'write it in quotes: "{value}"'
    message = f"{value!r} should be {' or '.join(dict.fromkeys(expected))}"
    return _finding("CONFIG-VALUE", key, message, help, nearest_words(value, choices))
