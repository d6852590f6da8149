"""Explanations of the codes of findings: the error, an example that shows it, and the correction."""

import difflib
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import allocation.compiler
import allocation.convert.rules  # noqa: F401  (both register rules)
from allocation.registry import RULES

_FILE = Path(__file__).with_name("rules") / "explanations.toml"


@dataclass(frozen=True)
class Explanation:
    """Explanation of a finding's code."""

    code: str
    title: str
    cause: str
    example: str
    fix: str
    source: str = ""

    def __str__(self) -> str:
        example = "\n".join(f"    {line}" for line in self.example.splitlines())
        parts = [f"{self.code}: {self.title}", self.cause, f"Example:\n{example}", f"Fix: {self.fix}"]
        return "\n\n".join([*parts, *([f"Source: {self.source}"] if self.source else [])])


class UnknownCode(Exception):
    """No finding has this code; the message names the nearest ones."""


def explanations() -> dict[str, Explanation]:
    """Return the explanation of every rule of the compiler, by code."""
    entries = read_entries(_FILE)
    return {
        code: Explanation(code, entry["title"], RULES[code].reason, _command(entry), entry["fix"], RULES[code].source)
        for code, entry in entries.items()
    }


def read_entries(file: Path) -> dict[str, dict[str, Any]]:
    """Return the tables of a file of explanations, by code."""
    return tomllib.loads(file.read_text(encoding="utf-8"))


def find(code: str, known: Mapping[str, Explanation]) -> Explanation:
    """Return the explanation of a code in any case. Raises UnknownCode with the nearest codes."""
    code = code.strip().upper()
    if code in known:
        return known[code]
    raise UnknownCode(f"No finding has the code {code}. {_nearest(code, known)}")


def _nearest(code: str, known: Iterable[str]) -> str:
    """Return a sentence about the codes that may have been meant: the ones that begin with it, or the most similar
    one."""
    known = list(known)
    near = [other for other in known if other.startswith(f"{code}-")] or difflib.get_close_matches(code, known, n=1)
    return f"The nearest {'is' if len(near) == 1 else 'are'} {', '.join(near)}." if near else ""


def _command(entry: Mapping[str, Any]) -> str:
    """Return an example as a command, and in a comment the settings without an option."""
    text = entry.get("example", "")
    if "from" in entry:
        return f"allocation convert {shlex.quote(text)} --from {entry['from']}"
    words = ["allocation", "check", shlex.quote(text)]
    if "to" in entry:
        words = ["allocation", "convert", shlex.quote(text), "--to", entry["to"]]
    if "fields" in entry:
        return "\n".join(f"{role}.backend={layout}" for role, layout in entry["fields"].items())
    words += [f"--{name} {entry[name]}" for name in ("model", "cluster", "order") if name in entry]
    further = [
        f"{name}={value}" for group in ("batch", "megatron", "memory") for name, value in entry.get(group, {}).items()
    ]
    return " ".join(words) + (f"\n# with {', '.join(map(_plain, further))}" if further else "")


def _plain(setting: str) -> str:
    """Return a setting with YAML's words for Python's."""
    return setting.replace("=True", "=true").replace("=False", "=false")
