"""The example of docs/capability.md and a backend of servers: folders in a copy of the tree, which a run uses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from running import CONFIG, Run, run
from trees import ROOT, add_folder, ask_in, copy_tree, run_in

PAGE = (ROOT / "docs/capability.md").read_text()
FILES = dict(re.findall(r"^`(\w+\.\w+)`:\n\n```\w+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
GENERATE = "import runpy, sys; [runpy.run_path(f'docs/generate/{it}.py', run_name='__main__') for it in sys.argv[1:]]"


EXAMPLE, BACKEND = "areal_like/capabilities/long_responses", "areal_like/backends/fake"
FAKE = {"backend.py": (ROOT / "tests/rollout/fake_backend.py").read_text()}
ON_FAKE = (
    *("rollout.backend=fake:d1", "weight_update.mode=disk", "total_train_steps=3", "warm_start=null"),
    *("rollout.max_logprob_diff=100", "rollout.drift_probe_tokens=0", "evaluator.at_start=false"),
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with the example and with a backend that no other file knows."""
    tree = copy_tree(tmp_path_factory.mktemp("copy"))
    add_folder(tree, EXAMPLE, FILES)
    add_folder(tree, BACKEND, FAKE)
    return tree


def test_a_folder_adds_a_key_a_check_a_code_and_a_command(tree: Path, tmp_path: Path) -> None:
    assert set(FILES) == {"schema.py", "capability.py", "engine.py", "commands.py", "codes.toml"}
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rollout/long_share": 0.25}\n')
    check = ("check", str(CONFIG), f"cluster.fileroot={tmp_path / 'runs'}")
    settings = ("gconfig.long_tokens=4", "gconfig.long_tokens=100000", "gconfig.long_token=4")
    others = (("explain-code", "RUN-LONG-NEVER"), ("long", str(tmp_path)))
    accepted, refused, misspelt, explained, printed = ask_in(tree, *((*check, it) for it in settings), *others)
    assert accepted[0] == 0, accepted
    assert refused[0] == 2 and "RUN-LONG-NEVER" in refused[2], refused
    assert "gconfig.long_tokens" in misspelt[2]
    assert "No response is long" in explained[1]
    assert printed[1] == "1: 25%\n", printed

    pages = run_in(tree, "-c", GENERATE, "configuration", "capabilities")
    assert pages.returncode == 0, pages.stderr
    assert "`long_tokens`" in (tree / "docs/configuration.md").read_text()
    assert '"gconfig.long_tokens"' in (tree / "areal_like/core/config/capability_keys.toml").read_text()


def test_a_layout_of_the_backend_is_checked(tree: Path, tmp_path: Path) -> None:
    check = ("check", str(CONFIG), f"cluster.fileroot={tmp_path / 'runs'}", *ON_FAKE)
    accepted, refused = ask_in(tree, check, (*check, "rollout.backend=fake:d1t2"))
    assert accepted[0] == 0, accepted
    assert refused[0] == 2 and "ALLOC-LETTER-BACKEND" in refused[2], refused


def test_the_demo_trains_on_the_backend_and_the_example_s_hook_measures_every_step(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree)  # where Ray's workers look for modules first
    settings = (*ON_FAKE, "gconfig.long_tokens=4", "actor.entropy_cost=0.01")
    script = tree / "examples/math/gsm8k_rl.py"
    with run(tmp_path, *settings, script=script, env={"PYTHONPATH": str(tree)}) as started:
        assert started.end() == 0, started.output + started.errors
    assert started.steps() == [1, 2, 3]
    rows = metrics_of(started)
    assert [row["rollout/long_share"] for row in rows] == pytest.approx([1, 1, 1], abs=1)
    priced = [(row["train/entropy_cost"], 0.01 * row["train/entropy"]) for row in rows]
    assert all(cost == pytest.approx(entropy, rel=1e-4) and cost > 0 for cost, entropy in priced)
    assert rows[-1]["rollout/long_responses"] >= rows[0]["rollout/long_responses"] >= 0
    assert all(row["seconds/weight_update"] > 0 for row in rows if "seconds/weight_update" in row)


def metrics_of(started: Run) -> list[dict[str, float]]:
    """Rows of the steps."""
    rows = map(json.loads, (started.directory / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "seconds/step" in row]
