"""A setting of another system means here what it means there: the resolved values, not the words, are compared."""

import re
import shlex

import meanings
import pytest
import yaml

from areal_like.algorithms.settings import KEYS, PRESETS, settings_of
from areal_like.config.load import load
from areal_like.interop.completion import fill_placeholders
from areal_like.interop.keys import DEFAULTS, TABLES, entry
from areal_like.interop.migrate import migrate

SHORT = {"A.": "actor_rollout_ref.actor.", "R.": "actor_rollout_ref.rollout.", "M.": "actor_rollout_ref.model."}
ROWS = [
    (system, *map(str.strip, line.split("->")))
    for system, (_, table) in meanings.SYSTEMS.items()
    for line in table.strip().splitlines()
    if line
]


def with_settings(system, settings):
    """The base configuration of a system with settings, in the system's own form."""
    base = meanings.SYSTEMS[system][0].strip()
    if system == "slime":
        return f"{base} {settings}\n".replace("\n--", " --")
    if system in ("verl", "siirl"):
        own = " ".join(re.sub(r"^[ARM]\.", lambda m: SHORT[m[0]], part) for part in settings.split())
        return f"{' '.join(base.split())} {own}\n"
    tree = yaml.safe_load(base)
    for part in re.findall(r"\S+?=(?:\{.*?\}+(?=\s|$)|\[.*?\](?=\s|$)|\S+)", settings):
        key, _, value = part.partition("=")
        *path, last = key.split(".")
        node = tree
        for name in path:
            node = node.setdefault(name, {})
        node[last] = yaml.safe_load(value)
    return yaml.safe_dump(tree)


def resolved(config, key):
    """The value that a run takes for a key: of what an algorithm decides, with its preset."""
    value, names = config, key.split(".")
    if names[0] == "actor" and names[1] in KEYS:
        value, names = settings_of(PRESETS[config.algorithm], config.actor), names[1:]
    for name in names:
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


@pytest.mark.parametrize(("system", "settings", "wanted"), ROWS, ids=[f"{r[0]}: {r[1]} -> {r[2]}" for r in ROWS])
def test_a_setting_has_the_value_that_it_has_there(system, settings, wanted):
    done = migrate(with_settings(system, settings), system)
    assert done.problems == []
    if wanted == "!":
        assert done.changes
        load(yaml.safe_load(fill_placeholders(done.yaml)))  # the YAML is there all the same
        return
    key, _, value = wanted.partition(" = ")
    config = load(yaml.safe_load(fill_placeholders(done.yaml))).config
    assert resolved(config, key) == yaml.safe_load(re.sub(r"^(\d+)e", r"\1.0e", value) if value != "None" else "null")
    assert done.changes == {}, done.report()


def test_the_tables_have_forty_settings_of_each_system():
    for system in meanings.SYSTEMS:
        assert sum(row[0] == system for row in ROWS) >= 40
    assert shlex.split(meanings.SLIME_BASE)


@pytest.mark.parametrize("system", TABLES)
def test_every_default_of_another_system_is_a_key_of_its_table(system):
    ours_too = {"areal"}  # whose keys are ours where they are called alike
    assert [key for key in DEFAULTS[system] if entry(system, key) is None and system not in ours_too] == []
