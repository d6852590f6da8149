"""Loading a configuration from YAML and `key=value` overrides, with every error reported in one pass."""

import re
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from allocation.diagnostics import Finding, Severity, Source
from areal_like.core.config.findings import ConfigError, Origins, finding
from areal_like.core.config.keys import (
    MASK,
    annotation_of,
    find_masked_keys,
    is_below,
    mask,
    members,
    takes_text,
    value_at,
)
from areal_like.core.config.schema import RunConfig
from areal_like.core.config.validate import check_adapters, first_causes, unknown_key, validate, wrong_keys

RENAMED: Mapping[str, str] = {
    "weight_update.ahead_mb": "weight_update.prefetch_mb"
}  # an old name works for one release
COMMAND_LINE = "command line"
PYTHON = "given from Python"
THE_TIME = "the start time"
_MASKED = f"the value is masked ({MASK}), because the files of a run hold no secrets"
_UNMASKED = "write the value, or read it from the environment: ${oc.env:NAME}"
_ALTERNATIVES = (
    ("actor.path", "actor.init_model"),
    ("allocation_mode", "actor.backend"),
    ("allocation_mode", "rollout.backend"),
)


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration whose keys and types are right, where each of them was set, and warnings about renamed keys."""

    config: RunConfig
    origins: Origins
    warnings: tuple[Finding, ...] = ()


def load(
    source: str | Path | Mapping[str, Any] | RunConfig | LoadedConfig, overrides: Sequence[str] = ()
) -> LoadedConfig:
    """Read a run's YAML, or the mappings of one, and apply overrides such as `actor.backend=megatron:d4`.

    Raises ConfigError with everything that is wrong with keys, types, references and overrides. Values may refer to
    each other (`${gconfig.n_samples}`). An override of a text is taken letter by letter, so no quotes are needed
    beyond the shell's own. Of two keys that exclude each other (`actor.path` and `actor.init_model`,
    `allocation_mode` and the roles' `backend`) the command line's one unsets the file's. An empty `trial_name` becomes
    the present time.
    """
    data, places = _contents(source)
    findings = [found for text in overrides if (found := _override(data, places, text))]
    renamed = list(rename_keys(data, places))
    warnings = tuple(found for found in renamed if found.severity is Severity.WARNING)
    findings += [found for found in renamed if found.severity is Severity.ERROR]
    _settle_alternatives(data, places)
    origins = Origins(places)
    findings += wrong_keys(data)
    values = _resolve(data, findings)
    findings += wrong_keys(values)  # of sections that were referred to
    findings += [finding("CONFIG-SECRET", key, _MASKED, _UNMASKED) for key in find_masked_keys(values)]
    if not values.get("trial_name"):
        values["trial_name"], places["trial_name"] = time.strftime("%Y%m%d-%H%M%S"), THE_TIME
    config, objections = validate(values)
    if config is not None:
        objections = list(check_adapters(config))
    findings = first_causes([*findings, *objections], data)
    if findings or config is None:
        raise ConfigError(map(origins.locate, findings))
    return LoadedConfig(config, origins, warnings)


def dump(config: RunConfig) -> str:
    """Return the resolved configuration as YAML, every key written out, for people and for files: secrets are masked.

    `load` gives the same configuration back where there are none.
    """
    return yaml.dump(mask(config.model_dump()), Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Quotes a text such as `1e5`, which is none to OmegaConf (YAML 1.2) but would be plain text to PyYAML (1.1)."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+.\d]"), list("-+.0123456789"))


def _contents(
    source: str | Path | Mapping[str, Any] | RunConfig | LoadedConfig,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return nested mappings that may be changed, and the place of each key."""
    if isinstance(source, str | Path):
        return _read(source)
    if isinstance(source, LoadedConfig):
        return source.config.model_dump(), dict(source.origins.places)
    values = source.model_dump() if isinstance(source, RunConfig) else source
    try:
        data = OmegaConf.to_container(OmegaConf.create(dict(values)))
    except OmegaConfBaseException as error:
        raise _error("CONFIG-FILE", PYTHON, f"not a configuration: {_first_line(error)}", "correct it") from error
    return _with_text_keys(data), {str(key): PYTHON for key in values}


def _read(file: str | Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the YAML as nested mappings, and the line of each key."""
    name = str(file)
    try:
        text = Path(file).read_text()
        tree = OmegaConf.create(text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise _error("CONFIG-FILE", name, f"{name} cannot be read: {reason}", "name a YAML file") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{name}:{mark.line + 1}" if mark else name
        problem = getattr(error, "problem", None) or error
        raise _error("CONFIG-FILE", place, f"the file is not valid YAML: {problem}", "correct this line") from error
    except OmegaConfBaseException as error:
        raise _error("CONFIG-FILE", name, f"not a configuration: {_first_line(error)}", "correct it") from error
    if not isinstance(tree, DictConfig):
        help = "begin with a line such as `experiment_name: demo`"
        raise _error("CONFIG-FILE", name, "the file is not a mapping of keys to values", help)
    return _with_text_keys(OmegaConf.to_container(tree)), dict(_lines(node, "", name))


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    return {str(key): _with_text_keys(part) for key, part in value.items()} if isinstance(value, dict) else value


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _resolve(data: dict[str, Any], findings: list[Finding]) -> dict[str, Any]:
    """Return the values with `${...}` resolved, without values that have a finding or get one here."""
    refused = {found.key for found in findings}
    help = "refer to a key that is set by its full dotted name, such as ${gconfig.n_samples}"

    def values_of(node: DictConfig, prefix: str) -> dict[str, Any]:
        values = {}
        for key, name in ((f"{prefix}{name}", name) for name in map(str, node) if f"{prefix}{name}" not in refused):
            try:
                value = node[name]
                if isinstance(value, ListConfig):
                    value = OmegaConf.to_container(value, resolve=True)
                values[name] = values_of(value, f"{key}.") if isinstance(value, DictConfig) else value
            except OmegaConfBaseException as error:
                findings.append(finding("CONFIG-REFERENCE", key, _first_line(error), help))
        return values

    return values_of(OmegaConf.create(data), "")


def _error(code: str, place: str, message: str, help: str) -> ConfigError:
    return ConfigError([Finding(code, Severity.ERROR, message, Source("", place), help=help)])


def _lines(node: yaml.Node | None, prefix: str, file: str) -> Iterator[tuple[str, str]]:
    """Yield dotted key and `file:line` of every key of a YAML mapping."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        yield prefix + key.value, f"{file}:{key.start_mark.line + 1}"
        yield from _lines(value, f"{prefix}{key.value}.", file)


def _override(data: dict[str, Any], places: dict[str, str], text: str) -> Finding | None:
    """Apply one `key=value` to `data`; return its finding, if any."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        places[text] = COMMAND_LINE
        return finding("CONFIG-OVERRIDE", text, "this is not an override", f"write {key or 'key'}=value")
    for replaced in [place for place in places if is_below([place], key)]:
        del places[replaced]
    places[key] = COMMAND_LINE
    annotation = annotation_of(RENAMED.get(key, key))
    if annotation is None:
        return unknown_key(key)
    try:
        parsed = _parse(value, annotation)
        OmegaConf.create({key: parsed})  # raises where a reference has no end
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        return finding("CONFIG-OVERRIDE", key, f"{value} is not a YAML value: {_first_line(error)}")
    node = data
    *sections, leaf = key.split(".")
    for section in sections:
        if not isinstance(node.get(section), dict):
            node[section] = {}
        node = node[section]
    node[leaf] = parsed
    return None


def _settle_alternatives(data: dict[str, Any], places: dict[str, str]) -> None:
    """Unset keys of the file for which the command line sets the alternative."""
    said = [key for key, place in places.items() if place == COMMAND_LINE]
    for pair in _ALTERNATIVES:
        for key, other in (pair, pair[::-1]):
            given = is_below(said, key) and value_at(data, key) is not None
            if given and not is_below(said, other) and value_at(data, other) is not None:
                section, _, leaf = other.rpartition(".")
                (data[section] if section else data)[leaf] = None


def _parse(value: str, annotation: Any) -> Any:
    """Return an override's value: text where the key takes text, else as YAML would read it."""
    if not takes_text(annotation):
        return _with_text_keys(OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"])))["value"]
    if value == "null" and types.NoneType in members(annotation):
        return None
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":  # quotes that Hydra would have wanted
        return value[1:-1]
    return value


def rename_keys(data: dict[str, Any], places: dict[str, str]) -> Iterator[Finding]:
    """Move the values of old keys to the new ones, in place; yield a warning for each, or an error if both are set."""
    for old, new in RENAMED.items():
        section, _, leaf = old.rpartition(".")
        values: Any = data
        for name in section.split("."):
            values = values.get(name) if isinstance(values, dict) else None
        if not isinstance(values, dict) or leaf not in values:
            continue
        renamed = new.rpartition(".")[2]
        if renamed in values:
            message = f"{old} is the old name of {new}, which is set too"
            yield finding("CONFIG-RENAMED", old, message, f"remove {old}")
            continue
        values[renamed] = values.pop(leaf)
        places[new] = places.pop(old, places.get(section, ""))
        message, help = f"this key is now {new}; the old name works for one release", f"write {new}"
        yield finding("CONFIG-RENAMED", new, message, help, severity=Severity.WARNING)
