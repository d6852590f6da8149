"""Each capability can be deleted: the rest checks and trains without it, and its keys name the missing folder."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from running import CONFIG, Run, run
from trees import ROOT, ask_in, copy_tree

FOLDER = "areal_like/capabilities"
KEYS = tomllib.loads((ROOT / "areal_like/core/config/capability_keys.toml").read_text())
NAMES = sorted(file.parent.name for file in (ROOT / FOLDER).glob("*/capability.py"))
DELETED = [f"{FOLDER}/{name}" for name in NAMES] + [FOLDER]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, from which each test takes a folder for a while."""
    return copy_tree(tmp_path_factory.mktemp("copy"), "tests/capabilities")


@contextmanager
def without(tree: Path, deleted: str) -> Iterator[None]:
    """Take a folder out of the tree."""
    (tree / deleted).rename(aside := tree.parent / "aside")
    try:
        yield
    finally:
        aside.rename(tree / deleted)


@pytest.mark.parametrize("deleted", DELETED)
def test_the_rest_accepts_a_run_and_names_the_folder_of_a_missing_key(tree: Path, tmp_path: Path, deleted: str) -> None:
    check = ("check", str(CONFIG), f"cluster.fileroot={tmp_path / 'runs'}")
    missing = {name: own["keys"] for name, own in KEYS.items() if deleted in (FOLDER, f"{FOLDER}/{name}")}
    with without(tree, deleted):
        accepted, *refused = ask_in(tree, check, *([*check, f"{keys[0]}=1"] for keys in missing.values()))
    assert accepted[0] == 0, accepted
    for name, (code, _, errors) in zip(missing, refused, strict=True):
        assert code == 2
        assert "CONFIG-REMOVED-KEY" in errors and f"{FOLDER}/{name}" in errors, errors


@pytest.mark.long
@pytest.mark.parametrize("deleted", DELETED)
def test_the_rest_trains(tree: Path, tmp_path: Path, deleted: str) -> None:
    script, environment = tree / "examples/math/gsm8k_rl.py", {"PYTHONPATH": str(tree)}
    settings = ("total_train_steps=2",)
    with without(tree, deleted), run(tmp_path, *settings, script=script, env=environment) as started:
        assert started.end() == 0, started.output + started.errors
    assert_trained(started)


def assert_trained(started: Run) -> None:
    """A run has made its steps and a checkpoint."""
    assert started.steps() == [1, 2]
    assert (started.directory / "checkpoints/step-2").is_dir()
