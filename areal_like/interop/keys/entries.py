"""Rows of the tables: our equivalent of another system's key, read from the TOML files beside this module.

A file has the groups `ours` (their key: ours), `together` (our keys that follow from several of theirs), `unneeded`
(a reason, and the keys without effect) and `changes` (a key: the reason, and the values that change nothing). A reason
or a mapping of values may be a name in `shared.toml`. `include` adds another file's rows below the key `at`, with
`{ours}` and `{role}` replaced by our section and its role.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """One meaning of a key: our key, or why none is needed, or why training changes.

    `values` maps the values of the key to ours, None to leave it out; `below` appends the rest of a longer key. With
    `same`, the key changes nothing if it has one of these values. `together` names our keys that follow from this key
    and others.
    """

    ours: str | None = None
    unneeded: str | None = None
    changes: str | None = None
    together: str | None = None
    values: Mapping[str, Any] | None = None
    same: tuple[Any, ...] = ()
    below: bool = False

    def __hash__(self) -> int:
        return hash((self.ours, self.unneeded, self.changes, self.together))

    def of_section(self, ours: str) -> "Entry":
        """Return the entry with our section in the place of `{ours}`, and its role in the place of `{role}`."""
        texts = {name: getattr(self, name) for name in ("ours", "unneeded", "changes", "together")}
        role = ours.partition(".")[0]
        named = {n: text and text.replace("{ours}", ours).replace("{role}", role) for n, text in texts.items()}
        return replace(self, **named)


Table = dict[str, Entry]


def rename(key: str) -> Entry:
    """Return the entry of a key that has another name here."""
    return Entry(ours=key)


@cache
def read(name: str) -> dict[str, Any]:
    """Return the content of a file of this folder."""
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))


def table(rows: str, at: str = "", ours: str = "", only: Sequence[str] = ("",)) -> Table:
    """Return the rows of a file and of the files that it includes: below the key `at`, and of the sections `only`."""
    found: Table = {}
    for part in read(rows).get("include", ()):
        found |= table(**part)
    found |= _own_rows(read(rows))
    prefix = f"{at}." if at else ""
    below = {f"{prefix}{key}": row for key, row in found.items() if key.startswith(tuple(only))}
    return {key: row.of_section(ours) for key, row in below.items()} if ours else below


def _own_rows(file: Mapping[str, Any]) -> Table:
    """Return the rows that a file itself has."""
    reasons = read("shared")["reasons"]
    rows = {key: _read_row(row) for key, row in file.get("ours", {}).items()}
    rows |= {key: Entry(together=ours) for ours, keys in file.get("together", {}).items() for key in keys}
    for reason, keys in file.get("unneeded", {}).items():
        rows |= dict.fromkeys(keys, Entry(unneeded=reasons.get(reason, reason)))
    for key, (reason, *same) in file.get("changes", {}).items():
        rows[key] = Entry(changes=reasons.get(reason, reason), same=(None, *same))
    return rows


def _read_row(row: str | Mapping[str, Any]) -> Entry:
    """Return the entry of a key with another name: the name, or a table with `key`, `values`, `unset` and `below`."""
    if isinstance(row, str):
        return Entry(ours=row)
    values = row.get("values", {})
    values = read("shared")["values"][values] if isinstance(values, str) else values
    values = {**values, **dict.fromkeys(row.get("unset", ()))}
    return Entry(ours=row["key"], values=values or None, below=row.get("below", False))


def prune(table: Table) -> Table:
    """Return the table without entries that repeat the entry of the nearest section."""

    def nearest(key: str) -> Entry | None:
        sections = (key[:place] for place in range(len(key) - 1, 0, -1) if key[place] == ".")
        return next((table[section] for section in sections if section in table), None)

    return {key: entry for key, entry in table.items() if nearest(key) != entry}
