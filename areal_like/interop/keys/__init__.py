"""Keys of other systems' configurations: our key, the reason why none is needed, or the change of training.

Each system has a file here with its keys and its defaults, such as `areal.toml`; `entries.py` explains its form.
`areal_like/interop/migrate.py` and the error about an unknown key read them. A dotted key covers all keys below it that
have no entry of their own. Values that follow from several keys are in `areal_like/interop/rules/`.
"""

import re
from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches
from itertools import takewhile
from typing import Any

from areal_like.core.config.keys import all_keys, annotation_of
from areal_like.interop.keys.entries import Entry, prune, read, rename, table
from areal_like.interop.keys.shared import SYNONYMS

TITLES = {
    "areal": "AReaL",
    "verl": "verl",
    "siirl": "siiRL",
    "trinity": "Trinity-RFT",
    "roll": "ROLL",
    "slime": "slime",
}
TABLES = {system: prune(table(system)) for system in TITLES}
DEFAULTS = {system: read("verl" if system == "siirl" else system)["defaults"] for system in TITLES}
_ENTRIES = [pair for rows in TABLES.values() for pair in rows.items()] + [
    (name, rename(ours)) for name, ours in SYNONYMS.items()
]
_SHORTEST = 3  # letters of a name such as `type`, which means something else in every section


def defaults_of(system: str, text: str) -> Mapping[str, Any]:
    """Return the defaults that a configuration or command has; verl's trainers have their own."""
    if system == "verl" and is_sft_command(text):
        own = read("verl_sft")
        if "fsdp_sft_trainer" in text:
            return own["pairs"]
        return own["messages"] | own["automodel"] if re.search(r"\boptim=automodel\b", text) else own["messages"]
    is_async = system == "verl" and is_async_command(text)
    return DEFAULTS[system] | (read("verl")["async_defaults"] if is_async else {})


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
    rows, name = TABLES[system], plain_key(key)
    while name not in rows and "." in name:
        name = name.rpartition(".")[0]
    if name not in rows and system == "slime" and name.startswith("sglang-"):
        name = "sglang"
    return (name, rows[name]) if name in rows else None


def plain_key(key: str) -> str:
    """Return a key without positions in lists."""
    return re.sub(r"\.\d+(?=\.|$)", "", key)


def known_elsewhere(key: str) -> tuple[str, str | None] | None:
    """Explain another system's key in a sentence, with our key; match its last part too, if all systems agree."""
    for system, rows in TABLES.items():
        if found := rows.get(key):
            return f"{TITLES[system]}'s key: {_words(found)}", found.ours
    last = _last_name(key)
    if last in SYNONYMS:
        return _by_meaning(key, last)
    same = {found for rows in TABLES.values() for name, found in rows.items() if _last_name(name) == last}
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
            best = max(targets, key=lambda target: _fit(key, target, targets[target]))
            return f"write {best} instead", best
    return None


def _fit(key: str, target: str, count: int) -> tuple[int, ...]:
    """Return how well our key fits: sections in common, then number of entries, then the actor, then few sections."""
    pairs = zip(key.split(".")[:-1], target.split(".")[:-1], strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return shared, count, target.startswith("actor"), -target.count(".")


def _last_name(key: str) -> str:
    """Return the last part of a key or option, in the spelling of keys."""
    return key.rpartition(".")[2].replace("-", "_")


def _words(found: Entry) -> str:
    if found.ours:
        return f"write {found.ours} instead"
    if found.together:
        return f"write {found.together} instead"
    return f"leave it out: {found.unneeded}" if found.unneeded else f"not supported: {found.changes}"
