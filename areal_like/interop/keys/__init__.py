"""Keys of other systems' configurations: what they are here, why nothing needs them, or that they change training.

One table of keys and one of defaults per system, read by `areal_like/interop/migrate.py` and by the message about an
unknown key. A dotted key covers all keys below it that have no entry of their own. What follows from several keys is in
`areal_like/interop/rules/`.
"""

import re

from areal_like.config.validate import FOREIGN_KEYS
from areal_like.interop.keys import areal, roll, siirl, slime, trinity, verl
from areal_like.interop.keys.entries import Entry, pruned

TITLES = {
    "areal": "AReaL",
    "verl": "verl",
    "siirl": "siiRL",
    "trinity": "Trinity-RFT",
    "roll": "ROLL",
    "slime": "slime",
}
TABLES = {
    "areal": pruned(areal.AREAL),
    "verl": pruned(verl.VERL),
    "siirl": pruned(siirl.SIIRL),
    "trinity": pruned(trinity.TRINITY),
    "roll": pruned(roll.ROLL),
    "slime": pruned(slime.SLIME),
}
DEFAULTS = {
    "areal": areal.DEFAULTS,
    "verl": verl.DEFAULTS,
    "siirl": siirl.DEFAULTS,
    "trinity": trinity.DEFAULTS,
    "roll": roll.DEFAULTS,
    "slime": slime.DEFAULTS,
}


def entry(system: str, key: str) -> tuple[str, Entry] | None:
    """Return the entry of a system's key with the name that it has in the table: its own, or the nearest section's.

    Places in lists do not count. An option of slime's servers has the entry of all of them.
    """
    table, name = TABLES[system], plain_key(key)
    while name not in table and "." in name:
        name = name.rpartition(".")[0]
    if name not in table and system == "slime" and name.startswith("sglang-"):
        name = "sglang"
    return (name, table[name]) if name in table else None


def plain_key(key: str) -> str:
    """Return a key without the places in lists."""
    return re.sub(r"\.\d+(?=\.|$)", "", key)


def known_elsewhere(key: str) -> tuple[str, str | None] | None:
    """Explain another system's key in a sentence, with our key; also by its last part, where all systems agree."""
    for system, table in TABLES.items():
        if found := table.get(key):
            return f"{TITLES[system]}'s key: {_words(found)}", found.ours
    last = key.rpartition(".")[2]
    same = {found for table in TABLES.values() for name, found in table.items() if name.rpartition(".")[2] == last}
    return (_words(found), found.ours) if len(same) == 1 and (found := same.pop()) else None


def _words(found: Entry) -> str:
    if found.ours:
        return f"write {found.ours} instead"
    if found.together:
        return f"write {found.together} instead"
    return f"leave it out: {found.unneeded}" if found.unneeded else f"not supported: {found.changes}"


FOREIGN_KEYS.append(known_elsewhere)
