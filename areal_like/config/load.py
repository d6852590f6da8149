"""YAML and `key=value` overrides in, a `RunConfig` out; everything that is wrong with them at once."""

from __future__ import annotations

import re
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from allocation.diagnostics import Finding, Severity, Source
from areal_like.config.findings import ConfigError, Origins, nearest_keys, nearest_words
from areal_like.config.keys import all_keys, annotation_of, members, takes_text
from areal_like.config.schema import RunConfig

COMMAND_LINE = "command line"
_ALTERNATIVES = (
    ("actor.path", "actor.init_model"),
    ("allocation_mode", "actor.backend"),
    ("allocation_mode", "rollout.backend"),
)
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


@dataclass(frozen=True)
class LoadedConfig:
    """A valid configuration and where each of its keys was set."""

    config: RunConfig
    origins: Origins


def load(file: str | Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a run's YAML and apply overrides such as `actor.backend=megatron:d4`; raises ConfigError.

    Values may refer to each other (`${gconfig.n_samples}`). An override of a text is taken letter by letter, so no
    quotes are needed beyond the shell's own. Of two keys that exclude each other (`actor.path` and `actor.init_model`,
    `allocation_mode` and the roles' `backend`) the command line's one unsets the file's. An empty `trial_name` becomes
    the present time.
    """
    data, places = _read(file)
    findings = [finding for text in overrides if (finding := _override(data, places, text))]
    _settle_alternatives(data, places)
    origins = Origins(places)
    values = _resolve(data, origins)
    if not values.get("trial_name"):
        values["trial_name"] = time.strftime("%Y%m%d-%H%M%S")
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError([*findings, *_findings(error, values, origins)]) from error
    if findings:
        raise ConfigError(findings)
    return LoadedConfig(config, origins)


def dump(config: RunConfig) -> str:
    """The resolved configuration as YAML, every key written out; `load` gives the same configuration back."""
    return yaml.dump(config.model_dump(), Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Quotes a text such as `1e5`, which is none to OmegaConf (YAML 1.2) but would be plain text to PyYAML (1.1)."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+.\d]"), list("-+.0123456789"))


def _read(file: str | Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The YAML as nested mappings, and the line of each key."""
    name = str(file)
    try:
        text = Path(file).read_text()
        tree = OmegaConf.create(text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise _error(name, f"{name} cannot be read: {error}", "name a YAML file with --config") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{name}:{mark.line + 1}" if mark else name
        raise _error(place, f"not YAML: {getattr(error, 'problem', None) or error}", "correct this line") from error
    except OmegaConfBaseException as error:
        raise _error(name, f"not a configuration: {_first_line(error)}", "correct it") from error
    if not isinstance(tree, DictConfig):
        raise _error(name, "not a mapping of keys to values", "begin with a line such as `experiment_name: demo`")
    return _plain(tree), dict(_lines(node, "", name))


def _error(place: str, message: str, help: str) -> ConfigError:
    return ConfigError([Finding("CONFIG-YAML", Severity.ERROR, message, Source("", place), help=help)])


def _lines(node: yaml.Node | None, prefix: str, file: str) -> Iterator[tuple[str, str]]:
    """Dotted key and `file:line` of every key of a YAML mapping."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        yield prefix + key.value, f"{file}:{key.start_mark.line + 1}"
        yield from _lines(value, f"{prefix}{key.value}.", file)


def _override(data: dict[str, Any], places: dict[str, str], text: str) -> Finding | None:
    """Apply one `key=value` to `data`; what is wrong with it, if anything."""
    key, equals, value = text.partition("=")
    here = Origins({key: COMMAND_LINE})
    if not equals:
        return here.finding("CONFIG-OVERRIDE", key, "not an override", f"write {key}=value")
    annotation = annotation_of(key)
    if annotation is None:
        return _unknown(key, here)
    try:
        parsed = _parse(value, annotation)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        return here.finding("CONFIG-OVERRIDE", key, f"{value} is not a YAML value: {_first_line(error)}")
    node = data
    *sections, leaf = key.split(".")
    for section in sections:
        if not isinstance(node.get(section), dict):
            node[section] = {}
        node = node[section]
    node[leaf] = parsed
    places[key] = COMMAND_LINE
    return None


def _settle_alternatives(data: dict[str, Any], places: dict[str, str]) -> None:
    """Unset what only the file says where the command line gives the alternative."""
    said = [key for key, place in places.items() if place == COMMAND_LINE]
    for pair in _ALTERNATIVES:
        for key, other in (pair, pair[::-1]):
            given = _below(said, key) and _value(data, key) is not None
            if given and not _below(said, other) and _value(data, other) is not None:
                section, _, leaf = other.rpartition(".")
                (data[section] if section else data)[leaf] = None


def _below(keys: Sequence[str], section: str) -> bool:
    """Whether one of the dotted keys is `section` or lies in it."""
    return any(key == section or key.startswith(f"{section}.") for key in keys)


def _value(data: Any, key: str) -> Any:
    """The value at a dotted key, None where there is none."""
    for part in key.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data


def _parse(value: str, annotation: Any) -> Any:
    """An override's value: text where the key takes text, else as YAML would read it."""
    if not takes_text(annotation):
        return _plain(OmegaConf.from_dotlist([f"value={value}"]))["value"]
    if value == "null" and types.NoneType in members(annotation):
        return None
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":  # quotes that Hydra would have wanted
        return value[1:-1]
    return value


def _resolve(data: dict[str, Any], origins: Origins) -> dict[str, Any]:
    """Replace `${...}` by what it refers to; raises ConfigError."""
    try:
        return _plain(OmegaConf.create(data), resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or ""
        help = "refer to a key by its full dotted name, such as ${gconfig.n_samples}"
        raise ConfigError([origins.finding("CONFIG-REFERENCE", key, _first_line(error), help)]) from error


def _plain(tree: DictConfig, *, resolve: bool = False) -> dict[str, Any]:
    """A configuration as plain mappings and values, with `${...}` replaced if `resolve`."""
    return {
        str(key): value for key, value in cast("dict[Any, Any]", OmegaConf.to_container(tree, resolve=resolve)).items()
    }


def _findings(error: ValidationError, values: dict[str, Any], origins: Origins) -> Iterator[Finding]:
    """One finding per key that pydantic objects to; it reports each alternative of a union on its own."""
    by_key: dict[str, list[ErrorDetails]] = {}
    for problem in error.errors(include_url=False, include_context=False):
        parts = _location(problem["loc"], values, missing=problem["type"] == "missing")
        by_key.setdefault(".".join(parts), []).append(problem)
    for key, problems in by_key.items():
        kinds = {problem["type"] for problem in problems}
        if "extra_forbidden" in kinds:
            yield _unknown(key, origins)
        elif "missing" in kinds:
            yield origins.finding(
                "CONFIG-MISSING", key, "this key must be set", f"write {key}=... or set it in the file"
            )
        else:
            yield _wrong_value(key, problems, origins)


def _location(parts: tuple[int | str, ...], values: Any, *, missing: bool) -> Iterator[str]:
    """The keys of a pydantic location; what it appends for an alternative of a union is left out."""
    for index, part in enumerate(parts):
        inside = isinstance(values, dict) and part in values
        if not inside and not (missing and index == len(parts) - 1):
            return
        yield str(part)
        values = values[part] if inside else None


def _unknown(key: str, origins: Origins) -> Finding:
    nearest = nearest_keys(key, all_keys())
    return origins.finding("CONFIG-UNKNOWN-KEY", key, "there is no such key", nearest=nearest)


def _wrong_value(key: str, problems: Sequence[ErrorDetails], origins: Origins) -> Finding:
    annotation, value = annotation_of(key), problems[0]["input"]
    choices = [choice for member in members(annotation) for choice in get_args(member) if isinstance(choice, str)]
    expected = [
        _EXPECTED.get(problem["type"]) or problem["msg"].removeprefix("Input should be ") for problem in problems
    ]
    help = None
    if isinstance(value, int | float) and takes_text(annotation):
        help = f'write it in quotes: "{value}"'
    message = f"{value!r} should be {' or '.join(dict.fromkeys(expected))}"
    return origins.finding("CONFIG-VALUE", key, message, help, nearest=nearest_words(value, choices))


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
