"""A backend of servers is one folder: the demo's loop runs on servers that no other file knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import CONFIG, run
from trees import copy_tree, run_in

FAKE = Path(__file__).with_name("fake_backend.py")
SETTINGS = (
    *("rollout.backend=fake:d1", "weight_update.mode=disk", "total_train_steps=3", "warm_start=null"),
    *("rollout.max_logprob_diff=100", "rollout.drift_probe_tokens=0", "evaluator.at_start=false"),
)


def add_backend(folder: Path) -> Path:
    """Copy the tree and add the folder of the backend."""
    tree = copy_tree(folder)
    added = tree / "areal_like/rollout/fake"
    added.mkdir()
    (added / "__init__.py").touch()
    (added / "backend.py").write_text(FAKE.read_text())
    return tree


def test_a_layout_of_the_backend_is_checked(tmp_path: Path) -> None:
    tree = add_backend(tmp_path)
    check = ("-m", "areal_like", "check", str(CONFIG), f"cluster.fileroot={tmp_path / 'runs'}", *SETTINGS)
    assert (accepted := run_in(tree, *check)).returncode == 0, accepted.stdout + accepted.stderr
    refused = run_in(tree, *check, "rollout.backend=fake:d1t2")
    assert refused.returncode == 2 and "ALLOC-LETTER-BACKEND" in refused.stderr, refused.stderr


def test_the_demo_trains_on_its_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = add_backend(tmp_path)
    monkeypatch.chdir(tree)  # where Ray's workers look for modules first
    script = tree / "examples/math/gsm8k_rl.py"
    with run(tmp_path, *SETTINGS, script=script, env={"PYTHONPATH": str(tree)}) as started:
        assert started.end() == 0, started.output + started.errors
    assert started.steps() == [1, 2, 3]
    rows = map(json.loads, (started.directory / "metrics.jsonl").read_text().splitlines())
    assert all(row["seconds/weight_update"] > 0 for row in rows if "seconds/weight_update" in row)
