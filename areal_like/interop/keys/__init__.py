"""Keys of other systems' configurations: our key, the reason why none is needed, or the change of training.

Each system has one table of keys and one of defaults, read by `areal_like/interop/migrate.py` and by the error about an
unknown key. A dotted key covers all keys below it that have no entry of their own. Values that follow from several keys
are in `areal_like/interop/rules/`.
"""

import re
from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches
from itertools import takewhile
from typing import Any

from areal_like.core.config.keys import all_keys, annotation_of
from areal_like.interop.keys import areal, roll, shared, siirl, slime, trinity, verl, verl_sft
from areal_like.interop.keys.entries import Entry, prune, rename

TITLES = {
    "areal": "AReaL",
    "verl": "verl",
    "siirl": "siiRL",
    "trinity": "Trinity-RFT",
    "roll": "ROLL",
    "slime": "slime",
}
TABLES = {
    "areal": prune(areal.AREAL),
    "verl": prune(verl.VERL),
    "siirl": prune(siirl.SIIRL),
    "trinity": prune(trinity.TRINITY),
    "roll": prune(roll.ROLL),
    "slime": prune(slime.SLIME),
}
DEFAULTS = {
    "areal": areal.DEFAULTS,
    "verl": verl.DEFAULTS,
    "siirl": siirl.DEFAULTS,
    "trinity": trinity.DEFAULTS,
    "roll": roll.DEFAULTS,
    "slime": slime.DEFAULTS,
}
_ENTRIES = [pair for table in TABLES.values() for pair in table.items()] + [
    (name, rename(ours)) for name, ours in shared.SYNONYMS.items()
]
_SHORTEST = 3  # letters of a name such as `type`, which means something else in every section


def defaults_of(system: str, text: str) -> Mapping[str, Any]:
    """Return the defaults that a configuration or command has; verl's trainers have their own."""
    if system == "verl" and is_sft_command(text):
        return verl_sft.defaults_of(text)
    return DEFAULTS[system] | verl.ASYNC_DEFAULTS if system == "verl" and is_async_command(text) else DEFAULTS[system]


def is_sft_command(text: str) -> bool:
    """Return whether a script starts verl's trainer for supervised fine-tuning."""
    return "sft_trainer" in text and "main_ppo" not in text


def is_async_command(text: str) -> bool:
    """Return whether a script starts verl's fully asynchronous trainer."""
    return bool(re.search(r"fully_async_(main|policy\.)|(?m:^async_training:)|\basync_training\.", text))


def entry(system: str, key: str) -> tuple[str, Entry] | None:
    """Return the entry of a system's key and its name in the table: its own, or the nearest section's.

    Positions in lists are ignored. An option of slime's servers has the entry of all of them.
    """
    table, name = TABLES[system], plain_key(key)
    while name not in table and "." in name:
        name = name.rpartition(".")[0]
    if name not in table and system == "slime" and name.startswith("sglang-"):
        name = "sglang"
    return (name, table[name]) if name in table else None


def plain_key(key: str) -> str:
    """Return a key without positions in lists."""
    return re.sub(r"\.\d+(?=\.|$)", "", key)


def known_elsewhere(key: str) -> tuple[str, str | None] | None:
    """Explain another system's key in a sentence, with our key; match its last part too, if all systems agree."""
    for system, table in TABLES.items():
        if found := table.get(key):
            return f"{TITLES[system]}'s key: {_words(found)}", found.ours
    last = _last_name(key)
    if last in shared.SYNONYMS:
        return _by_meaning(key, last)
    same = {found for table in TABLES.values() for name, found in table.items() if _last_name(name) == last}
    if len(same) == 1 and (found := same.pop()):
        return _words(found), found.ours
    return _by_meaning(key, last)


def _by_meaning(key: str, last: str) -> tuple[str, str] | None:
    """Return our key of a setting that other systems call alike in several places: the one of the nearest section."""
    misspelt = get_close_matches(last, map(_last_name, all_keys()), n=1, cutoff=0.85)
    for fits in (last.__eq__, *(() if misspelt else (lambda name: name.endswith(f"_{last}"),))):
        named = [
            found.ours or found.together for name, found in _ENTRIES if len(last) > _SHORTEST and fits(_last_name(name))
        ]
        targets = Counter(target for target in named if target and annotation_of(target) is not None)
        if targets:
            best = max(
                targets, key=lambda target: (_shared_sections(key, target), targets[target], target.startswith("actor"))
            )
            return f"write {best} instead", best
    return None


def _shared_sections(one: str, other: str) -> int:
    pairs = zip(one.split(".")[:-1], other.split(".")[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _last_name(key: str) -> str:
    """Return the last part of a key or option, in the spelling of keys."""
    return key.rpartition(".")[2].replace("-", "_")


def _words(found: Entry) -> str:
    if found.ours:
        return f"write {found.ours} instead"
    if found.together:
        return f"write {found.together} instead"
    return f"leave it out: {found.unneeded}" if found.unneeded else f"not supported: {found.changes}"
