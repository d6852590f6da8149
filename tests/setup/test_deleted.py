"""Each capability can be deleted: the rest checks and trains without it, and its keys name the missing folder."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from running import CONFIG, Run, run
from trees import ROOT, copy_tree, run_in

FOLDER = "areal_like/capabilities"
KEYS = tomllib.loads((ROOT / "areal_like/core/config/capability_keys.toml").read_text())
NAMES = sorted(file.parent.name for file in (ROOT / FOLDER).glob("*/capability.py"))
DELETED = [f"{FOLDER}/{name}" for name in NAMES] + [FOLDER]


@pytest.mark.parametrize("deleted", DELETED)
def test_the_rest_accepts_a_run_and_names_the_folder_of_a_missing_key(tmp_path: Path, deleted: str) -> None:
    tree = copy_tree(tmp_path, deleted, "tests/capabilities")
    check = ("-m", "areal_like", "check", str(CONFIG), f"cluster.fileroot={tmp_path / 'runs'}")
    accepted = run_in(tree, *check)
    assert accepted.returncode == 0, accepted.stdout + accepted.stderr
    missing = {name: own["keys"] for name, own in KEYS.items() if deleted in (FOLDER, f"{FOLDER}/{name}")}
    for name, keys in missing.items():
        refused = run_in(tree, *check, f"{keys[0]}=1")
        assert refused.returncode == 2
        assert "CONFIG-REMOVED-KEY" in refused.stderr and f"{FOLDER}/{name}" in refused.stderr, refused.stderr


@pytest.mark.long
@pytest.mark.parametrize("deleted", DELETED)
def test_the_rest_trains(tmp_path: Path, deleted: str) -> None:
    tree = copy_tree(tmp_path, deleted, "tests/capabilities")
    script, environment = tree / "examples/math/gsm8k_rl.py", {"PYTHONPATH": str(tree)}
    with run(tmp_path, "total_train_steps=2", script=script, env=environment) as started:
        assert started.end() == 0, started.output + started.errors
    assert_trained(started)


def assert_trained(started: Run) -> None:
    """A run has made its steps and a checkpoint."""
    assert started.steps() == [1, 2]
    assert (started.directory / "checkpoints/step-2").is_dir()
