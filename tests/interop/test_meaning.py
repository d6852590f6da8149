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


def test_supported_training_on_a_dataset_is_not_called_missing():
    """Supervised, preference and distillation training exist; only their other settings are left to the user."""
    slime = with_settings("slime", "--loss-type sft_loss")
    roll = [with_settings("roll", f"{key}={{model_args: {{dtype: bf16}}}}") for key in ("sft_train", "student_train")]
    texts = [slime, *roll, with_settings("roll", "beta=0.1"), with_settings("areal", "train_dataset.type=dpo")]
    for text, name in zip(texts, ("sft", "sft", "distill", "dpo", "dpo"), strict=True):
        done = migrate(text)
        assert f"algorithm={name}" in done.report()
        assert "is not supported" not in done.report()
        assert "not reinforcement learning" not in done.report()


@pytest.mark.parametrize(
    ("system", "settings", "key"),
    [
        ("verl", "R.val_kwargs.top_p=0.7 R.top_p=0.9", "actor_rollout_ref.rollout.top_p"),
        ("slime", "--eval-top-p 0.7 --rollout-top-p 0.9", "rollout-top-p"),
    ],
)
def test_the_limit_of_sampled_ids_is_noted_on_the_key_of_training(system, settings, key):
    assert list(migrate(with_settings(system, settings), system).changes) == [key]


@pytest.mark.parametrize(
    ("settings", "key", "note"),
    [
        ("rollout_rs=token", "rollout_rs", "token rejection without weights"),
        ("rollout_is=token C.rollout_rs=token", "rollout_rs", "token weights with token rejection"),
        ("rollout_is=other", "rollout_is", "other weights: "),
    ],
)
def test_a_correction_that_is_not_here_is_described_as_it_is(settings, key, note):
    there = "algorithm.rollout_correction."
    done = migrate(with_settings("verl", f"C.{settings}".replace("C.", there)), "verl")
    assert list(done.changes) == [f"{there}{key}"]
    assert done.changes[f"{there}{key}"].startswith(note)
