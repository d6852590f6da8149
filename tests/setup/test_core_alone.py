"""The core alone: without `capabilities/` and `interop/` its tests pass, and the demo learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trees import copy_tree, run_in

pytestmark = pytest.mark.long

DELETED = ("areal_like/capabilities", "areal_like/interop", "tests/capabilities", "tests/interop")
TESTS = (
    "tests/algorithms",
    "tests/rollout/test_admission.py",
    "tests/rollout/test_collector.py",
    "tests/rollout/test_dispatch.py",
    "tests/run/test_loop.py",
    "tests/run/test_train_step.py",
    "tests/trainer/test_packing.py",
    "tests/config/test_load.py",
    "tests/checkpoint/test_store.py",
)
LEARNT = 0.9


def test_its_tests_pass(tmp_path: Path) -> None:
    tests = run_in(copy_tree(tmp_path, *DELETED), "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS)
    assert tests.returncode == 0, tests.stdout[-3000:]


def test_the_demo_learns(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path, *DELETED)
    demo = ("examples/math/gsm8k_rl.py", "--config", "examples/math/gsm8k_grpo_cpu.yaml")
    ended = run_in(tree, *demo, f"cluster.fileroot={tmp_path / 'runs'}", timeout_s=3600)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    (summary,) = (tmp_path / "runs").rglob("summary.json")
    rewards = json.loads(summary.read_text())["held_out"]
    assert max(rewards.values()) >= LEARNT, rewards
