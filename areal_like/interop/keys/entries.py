"""Entries of the tables: our equivalent of another system's key."""

from collections.abc import Mapping
from dataclasses import dataclass
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


Table = dict[str, Entry]


def rename(key: str, values: Mapping[str, Any] | None = None, *, below: bool = False) -> Entry:
    """Return the entry of a key that has another name here."""
    return Entry(ours=key, values=values, below=below)


def drop(why: str) -> Entry:
    """Return the entry of a key that is unnecessary here and does not change training."""
    return Entry(unneeded=why)


def changes(why: str, *same: Any) -> Entry:
    """Return the entry of a key without an equivalent, which has no effect if its value is in `same`."""
    return Entry(changes=why, same=(None, *same))


def together(key: str) -> Entry:
    """Return the entry of a key that sets our `key` together with others (`areal_like.interop.keys.rules`)."""
    return Entry(together=key)


def prune(table: Table) -> Table:
    """Return the table without entries that repeat the entry of the nearest section."""

    def nearest(key: str) -> Entry | None:
        sections = (key[:place] for place in range(len(key) - 1, 0, -1) if key[place] == ".")
        return next((table[section] for section in sections if section in table), None)

    return {key: entry for key, entry in table.items() if nearest(key) != entry}
