"""The example of docs/capability.md: its files are added to a copy of the tree, and a run uses them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from running import CONFIG, Run, run
from trees import ROOT, copy_tree, run_in

PAGE = (ROOT / "docs/capability.md").read_text()
FILES = dict(re.findall(r"^`(\w+\.\w+)`:\n\n```\w+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
CHECK = ["-m", "areal_like", "check", str(CONFIG)]


def add_example(folder: Path) -> Path:
    """Copy the tree and add the example's folder."""
    tree = copy_tree(folder)
    added = tree / "areal_like/capabilities/long_responses"
    added.mkdir()
    for name, text in {"__init__.py": "", **FILES}.items():
        (added / name).write_text(text)
    return tree


def test_a_folder_adds_a_key_a_check_a_code_and_a_command(tmp_path: Path) -> None:
    assert set(FILES) == {"schema.py", "capability.py", "engine.py", "commands.py", "codes.toml"}
    tree = add_example(tmp_path)
    fileroot = f"cluster.fileroot={tmp_path / 'runs'}"
    assert run_in(tree, *CHECK, fileroot, "gconfig.long_tokens=4").returncode == 0
    refused = run_in(tree, *CHECK, fileroot, "gconfig.long_tokens=100000")
    assert refused.returncode == 2 and "RUN-LONG-NEVER" in refused.stderr, refused.stderr
    misspelt = run_in(tree, *CHECK, fileroot, "gconfig.long_token=4")
    assert "gconfig.long_tokens" in misspelt.stderr
    explained = run_in(tree, "-m", "areal_like", "explain-code", "RUN-LONG-NEVER")
    assert "No response is long" in explained.stdout
    pages = run_in(tree, "docs/generate/configuration.py")
    assert pages.returncode == 0 and "`long_tokens`" in (tree / "docs/configuration.md").read_text()
    keys = run_in(tree, "docs/generate/capabilities.py")
    assert (
        keys.returncode == 0
        and '["gconfig.long_tokens"]' in (tree / "areal_like/config/capability_keys.toml").read_text()
    )

    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rollout/long_share": 0.25}\n')
    printed = run_in(tree, "-m", "areal_like", "long", str(tmp_path))
    assert printed.stdout == "1: 25%\n", printed.stderr


def test_its_hook_measures_every_step_of_a_run(tmp_path: Path) -> None:
    tree = add_example(tmp_path)
    short = ("total_train_steps=2", "warm_start=null", "gconfig.long_tokens=4", "evaluator.at_start=false")
    short += ("actor.entropy_cost=0.01",)
    script = tree / "examples/math/gsm8k_rl.py"
    with run(tmp_path, *short, script=script, env={"PYTHONPATH": str(tree)}) as started:
        assert started.end() == 0, started.output + started.errors
    rows = metrics_of(started)
    assert [row["rollout/long_share"] for row in rows] == pytest.approx([1, 1], abs=1)
    priced = [(row["train/entropy_cost"], 0.01 * row["train/entropy"]) for row in rows]
    assert all(cost == pytest.approx(entropy, rel=1e-4) and cost > 0 for cost, entropy in priced)
    assert rows[-1]["rollout/long_responses"] >= rows[0]["rollout/long_responses"] >= 0


def metrics_of(started: Run) -> list[dict[str, float]]:
    """Rows of the steps."""
    rows = map(json.loads, (started.directory / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "seconds/step" in row]
