"""A run's YAML as arguments of `check`: the keys that bear on the layout, and the line of each.

Keys are AReaL's. Values may refer to other keys (`${gconfig.n_samples}`). What the file leaves out is not
checked; only `actor.ppo_n_minibatches` is then taken as 1, and `actor.init_model` has the run's own defaults.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from allocation.compiler import ROLE_ORDER
from allocation.diagnostics import Finding, Source, run_rules
from allocation.model_spec import INIT_MODEL, ModelSpec, from_init_model
from allocation.plan import Cluster
from allocation.settings import BatchSpec, MegatronSettings

COMMAND_LINE = "command line"
WHOLE = "allocation_mode"
PATH, SHAPE = "actor.path", "actor.init_model"
BACKENDS = tuple(f"{role}.backend" for role in ROLE_ORDER)
SETTINGS = ("actor.megatron", "actor.megatron.override_transformer_config")
_TYPES = {"str": str, "int": int, "bool": bool}
_OPTIONS = {option.name: _TYPES[kind] for option in fields(MegatronSettings)
            if (kind := str(option.type).removesuffix(" | None")) in _TYPES}  # fmt: skip
KEYS: dict[str, type] = {
    **dict.fromkeys((WHOLE, *BACKENDS, PATH), str),
    SHAPE: dict,
    **{f"{SHAPE}.{name}": bool if isinstance(default, bool) else int for name, default in INIT_MODEL.items()},
    **dict.fromkeys(("cluster.n_nodes", "cluster.n_gpus_per_node"), int),
    **dict.fromkeys(("train_dataset.batch_size", "gconfig.n_samples", "actor.ppo_n_minibatches"), int),
    **dict.fromkeys(("train_dataset.max_prompt_length", "valid_dataset.max_prompt_length"), int),
    **dict.fromkeys(("gconfig.max_new_tokens", "actor.mb_spec.max_tokens_per_mb"), int),
    **{f"{section}.{name}": kind for section in SETTINGS for name, kind in _OPTIONS.items()},
}
_WORDS = {str: "text", int: "a whole number", bool: "true or false", dict: "a section of keys"}
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_MOST_REFERENCES = 20


class RunFileError(ValueError):
    """The file cannot be read, or is not the YAML of a run; the message says where."""


@dataclass(frozen=True)
class RunFile:
    """What the file and the overrides say: arguments of `check`, and `places`, the line of each key."""

    arguments: dict[str, Any]
    places: dict[str, str]
    findings: tuple[Finding, ...]

    def place(self, finding: Finding) -> str | None:
        """Where the finding's key was set: `run.yaml:12` or `command line`; several joined by ` + `."""
        keys = (finding.key or "").split(" + ")
        return " + ".join(self.places[key] for key in keys if key in self.places) or None

    def locate(self, finding: Finding) -> Finding:
        """The finding with the place added to its key: `actor.backend (run.yaml:12)`."""
        if finding.key is None:
            return finding
        keys = [f"{key} ({self.places[key]})" if key in self.places else key for key in finding.key.split(" + ")]
        return replace(finding, source=replace(finding.source, key=" + ".join(keys)))


def read_run_file(file: str | Path, overrides: Sequence[str] = ()) -> RunFile:
    """Reads a run's YAML; `overrides` are `key=value`, taken letter by letter where the key holds a text.

    What is wrong with single values ends up in the findings. Raises `RunFileError` for a file that is no YAML
    mapping, and for an override that is not `key=value`.
    """
    values = _Values(str(file), *_read(file))
    findings = []
    for override in overrides:
        key = values.override(override)
        if key not in KEYS:
            values.places[key] = COMMAND_LINE
            findings += run_rules("run override", Source("", key), key, KEYS)
    arguments = _arguments(values)
    spec = arguments["spec"]
    backends = [key for key in BACKENDS if values.get(key) is not None]
    findings += run_rules("run", Source("", WHOLE), values.get(WHOLE), backends)
    findings += [f for key, why in values.problems.items() for f in run_rules("run value", Source("", key), why)]
    if not spec:
        arguments.pop("spec")
    return RunFile(arguments, values.places, tuple(findings))


@dataclass
class _Values:
    """The file's `tree`, its YAML `node`s, `places` of the keys that were read, `problems` of their values."""

    file: str
    tree: dict[str, Any]
    node: yaml.Node
    places: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def override(self, text: str) -> str:
        """Applies `key=value`; the key."""
        key, equals, value = text.partition("=")
        if not equals:
            raise RunFileError(f"{text!r} is no override; write key=value")
        parsed: Any = value
        if KEYS.get(key) is not str or value == "null":
            try:
                parsed = yaml.safe_load(value)
            except yaml.YAMLError as error:
                raise RunFileError(f"{text!r}: {value!r} is no YAML value") from error
        self.set(key, parsed)
        self.places[key] = COMMAND_LINE
        return key

    def set(self, key: str, value: Any) -> None:
        """Puts a value into the tree, and the sections above it where there are none."""
        *sections, leaf = key.split(".")
        node = self.tree
        for section in sections:
            if not isinstance(node.get(section), dict):
                node[section] = {}
            node = node[section]
        node[leaf] = value

    def overridden(self, key: str) -> bool:
        """Whether the command line gives the key, or one below it, a value."""
        said = [k for k, place in self.places.items() if place == COMMAND_LINE and f"{k}.".startswith(f"{key}.")]
        return bool(said) and self._raw(key) is not None

    def get(self, key: str) -> Any:
        """The value of a key of `KEYS`; None where it is not set or is of no use."""
        kind = KEYS[key]
        value = self._raw(key)
        if value is not None and key not in self.places and (line := _line(self.node, key)):
            self.places[key] = f"{self.file}:{line}"
        for _ in range(_MOST_REFERENCES):
            if not isinstance(value, str) or not (reference := _REFERENCE.search(value)):
                break
            target = self._raw(reference[1])
            if target is None:
                self.problems[key] = f"`{reference[0]}` refers to no key of this file"
                return None
            value = target if reference[0] == value else value.replace(reference[0], str(target))
        if value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
            return value
        self.problems[key] = f"{value!r} should be {_WORDS[kind]}"
        return None

    def unset(self, *keys: str) -> None:
        """Takes keys out of the tree."""
        for key in keys:
            section, _, leaf = key.rpartition(".")
            node = self._raw(section) if section else self.tree
            if isinstance(node, dict):
                node.pop(leaf, None)

    def _raw(self, key: str) -> Any:
        value: Any = self.tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def _read(file: str | Path) -> tuple[dict[str, Any], yaml.Node]:
    try:
        text = Path(file).read_text()
        tree, node = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise RunFileError(f"{file} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{file}:{mark.line + 1}" if mark else str(file)
        raise RunFileError(f"{place}: not YAML: {getattr(error, 'problem', None) or error}") from error
    except RecursionError as error:
        raise RunFileError(f"{file}: nested too deeply") from error
    if not isinstance(tree, dict):
        raise RunFileError(f"{file}: not a mapping of keys to values")
    return tree, node


def _line(node: yaml.Node, key: str) -> int | None:
    """The line of a dotted key, from 1; None where the file does not write it out."""
    line = None
    for part in key.split("."):
        entries = node.value if isinstance(node, yaml.MappingNode) else ()
        found = [(name, value) for name, value in entries if name.value == part]
        if not found:
            return None
        name, node = found[-1]
        line = name.start_mark.line + 1
    return line


def _arguments(values: _Values) -> dict[str, Any]:
    """The arguments of `check`, without those that the file says nothing about."""
    whole = _whole(values)
    roles = {key.removesuffix(".backend"): text for key in BACKENDS if (text := values.get(key)) is not None}
    found = {
        "spec": whole or roles,
        "key": WHOLE if whole else None,
        "model": _model(values),
        "cluster": _cluster(values),
        "batch": _batch(values),
        "megatron": MegatronSettings(**dict(_settings(values))),
    }
    return {name: value for name, value in found.items() if value is not None}


def _whole(values: _Values) -> str | None:
    """`allocation_mode`; of it and the roles' fields, the command line's unsets the file's."""
    said = {key for key, place in values.places.items() if place == COMMAND_LINE}
    if WHOLE in said and not said & set(BACKENDS):
        values.unset(*BACKENDS)
    elif WHOLE not in said and said & set(BACKENDS):
        values.unset(WHOLE)
    whole: str | None = values.get(WHOLE)
    return whole


def _model(values: _Values) -> ModelSpec | str | None:
    """`actor.path`, or the shape in `actor.init_model`; of the two, the command line's unsets the file's."""
    for key, other in ((PATH, SHAPE), (SHAPE, PATH)):
        if values.overridden(key) and not values.overridden(other):
            values.unset(other)
    path: str | None = values.get(PATH)
    section = values.get(SHAPE)
    if section is None:
        return path
    if path is not None:
        values.problems[PATH] = f"the model is also given by {SHAPE}; keep one of the two"
        return None
    values.set(SHAPE, section)  # where it was a reference
    given = {name: value for name in INIT_MODEL if (value := values.get(f"{SHAPE}.{name}")) is not None}
    for name, value in given.items():
        if KEYS[f"{SHAPE}.{name}"] is int and value < 1:
            values.problems[f"{SHAPE}.{name}"] = f"{value} should be at least 1"
    return None if any(key.startswith(SHAPE) for key in values.problems) else from_init_model(given, SHAPE)


def _cluster(values: _Values) -> Cluster | None:
    nodes, gpus = values.get("cluster.n_nodes"), values.get("cluster.n_gpus_per_node")
    if nodes is None or gpus is None:
        return None
    for key, value in (("cluster.n_nodes", nodes), ("cluster.n_gpus_per_node", gpus)):
        if value < 1:
            values.problems[key] = f"{value} should be at least 1"
    return None if min(nodes, gpus) < 1 else Cluster(nodes, gpus)


def _batch(values: _Values) -> BatchSpec | None:
    prompts, samples = values.get("train_dataset.batch_size"), values.get("gconfig.n_samples")
    if prompts is None or samples is None:
        return None
    lengths = [values.get(f"{dataset}.max_prompt_length") for dataset in ("train_dataset", "valid_dataset")]
    longest, new = max((n for n in lengths if n is not None), default=None), values.get("gconfig.max_new_tokens")
    minibatches = values.get("actor.ppo_n_minibatches")
    return BatchSpec(
        prompts,
        samples,
        n_minibatches=1 if minibatches is None else minibatches,
        max_length=None if longest is None or new is None else longest + new,
        max_tokens_per_mb=values.get("actor.mb_spec.max_tokens_per_mb"),
    )


def _settings(values: _Values) -> Iterator[tuple[str, Any]]:
    for section in SETTINGS:
        for name in _OPTIONS:
            if (value := values.get(f"{section}.{name}")) is not None:
                yield name, value
