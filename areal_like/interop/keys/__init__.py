"""Keys of other systems' configurations: what they are here, why they are not needed, or why they are not offered.

One table per system, read by `areal_like/interop/migrate.py` and by the message about an unknown key. A dotted key
covers all keys below it that have no entry of their own.
"""

from areal_like.config.validate import FOREIGN_KEYS
from areal_like.interop.keys.areal import AREAL
from areal_like.interop.keys.entries import Entry
from areal_like.interop.keys.roll import ROLL
from areal_like.interop.keys.siirl import SIIRL
from areal_like.interop.keys.slime import SLIME
from areal_like.interop.keys.trinity import TRINITY
from areal_like.interop.keys.verl import VERL

TITLES = {
    "areal": "AReaL",
    "verl": "verl",
    "siirl": "siiRL",
    "trinity": "Trinity-RFT",
    "roll": "ROLL",
    "slime": "slime",
}
TABLES = {"areal": AREAL, "verl": VERL, "siirl": SIIRL, "trinity": TRINITY, "roll": ROLL, "slime": SLIME}


def entry(system: str, key: str) -> Entry | None:
    """What `key` of `system` is here: its own entry, or that of the nearest section above it."""
    table = TABLES[system]
    while key not in table and "." in key:
        key = key.rpartition(".")[0]
    return table.get(key)


def known_elsewhere(key: str) -> tuple[str, str | None] | None:
    """What another system's key is here, in a sentence, and our key; also by its last part, where all systems agree."""
    for system, table in TABLES.items():
        if found := table.get(key):
            return f"{TITLES[system]}'s key: {_words(found)}", found.ours
    last = key.rpartition(".")[2]
    same = {found for table in TABLES.values() for name, found in table.items() if name.rpartition(".")[2] == last}
    return (_words(found), found.ours) if len(same) == 1 and (found := same.pop()) else None


def _words(found: Entry) -> str:
    if found.ours:
        return f"write {found.ours} instead"
    return f"leave it out: {found.unneeded}" if found.unneeded else f"not offered: {found.lost}"


FOREIGN_KEYS.append(known_elsewhere)
