"""Findings about a configuration: `allocation`'s findings, with the YAML line or the command line as the place."""

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from allocation.diagnostics import Finding, Severity, Source

KeyOf = Callable[[str], str]  # from a setting of a role, such as `megatron.bridge_type`, to its dotted key


def actor_key(setting: str) -> str:
    """Return the dotted key of the actor's setting."""
    return f"actor.{setting}"


@dataclass(frozen=True)
class Origins:
    """Places where keys were set: `run.yaml:12` or `command line`, by dotted key."""

    places: Mapping[str, str] = field(default_factory=dict)

    def place_of(self, key: str) -> str:
        """Return the place of a key or of its section, or `default` if it was not set."""
        while key:
            if key in self.places:
                return self.places[key]
            key = key.rpartition(".")[0]
        return "default"

    def locate(self, finding: Finding) -> Finding:
        """Return a finding with the place of its key, or of each key joined by ` + `."""
        if finding.key is None:
            return finding
        places = tuple(map(self.place_of, finding.key.split(" + ")))
        return replace(finding, source=replace(finding.source, places=places))


def finding(
    code: str,
    key: str,
    message: str,
    help: str | None = None,
    *,
    nearest: Iterable[str] = (),
    severity: Severity = Severity.ERROR,
) -> Finding:
    """Return a finding about a key; `Origins.locate` adds where the key was set."""
    return Finding(code, severity, message, Source("", key), help=help, nearest=tuple(nearest))


def warn_ignored(key: str, why: str, help: str | None = None) -> Finding:
    """Return the warning that a key has no effect."""
    return finding("RUN-UNUSED", key, f"ignored: {why}", help, severity=Severity.WARNING)


def missing_package(key: str, package: str | None) -> Finding:
    """Return the finding of a key that needs a missing package."""
    return finding("RUN-PACKAGE", key, f"the package {package} is not installed", "run `make setup`, or pip install it")


def check_variable(key: str, variable: str | None) -> Iterator[Finding]:
    """Check that the environment variable that a key names is set."""
    if variable is not None and variable not in os.environ:
        message, help = f"the environment variable {variable} is not set", f"export {variable}, or set {key}=null"
        yield finding("RUN-VARIABLE", key, message, help)


class ConfigError(Exception):
    """An invalid configuration; `findings` holds everything that is wrong with it."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("\n\n".join(map(str, self.findings)))


def nearest_keys(key: str, known: Iterable[str]) -> list[str]:
    """Return known dotted keys that `key` may mean: misspelt, or correct but in another section."""
    known = list(known)
    section, leaf = key.partition(".")[0], key.rpartition(".")[2]
    same_depth = [other for other in known if other.count(".") == key.count(".")]
    same_leaf = [other for other in known if other.rpartition(".")[2] == leaf]
    return (
        difflib.get_close_matches(key, same_depth, n=1, cutoff=0.75)
        or [other for other in same_leaf if other.startswith(f"{section}.")]
        or same_leaf[:3]
        or nearest_words(key, known)
    )


def nearest_words(word: Any, known: Iterable[str]) -> list[str]:
    """Return the known word closest to `word`, if one is close."""
    return difflib.get_close_matches(str(word), list(known), n=1)
