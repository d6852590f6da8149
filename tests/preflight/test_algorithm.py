"""The algorithm of a run is built and tried before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_like.config.load import load
from areal_like.preflight import preflight
from areal_like.preflight.algorithm import find_algorithm


def errors(file: Path, *overrides: str) -> list[str]:
    return [str(f) for f in preflight(load(file, overrides)).findings if str(f.severity) == "error"]


@pytest.mark.parametrize(
    "overrides",
    [
        *([f"algorithm={name}"] for name in ("grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo", "cispo")),
        ["algorithm=reinforce_pp", "gconfig.n_samples=1"],
        ["actor.kl_ctl=0.1", "ref={}"],
        ["algorithm=dpo", "ref={}"],
        ["algorithm=ppo", "critic={}", "gconfig.n_samples=1"],
    ],
)
def test_what_makes_sense_may_start(write, overrides):
    checked = preflight(load(write(), overrides))
    assert checked.ok, list(map(str, checked.findings))
    assert checked.job.algorithm is not None


def test_a_misspelt_name_is_told_with_the_nearest_one(write):
    (message,) = errors(write(), "algorithm=grop")
    assert "there is no algorithm 'grop'" in message and "grpo" in message


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("experience.rewards", "are array([1., 0., 0., 1.]"),
        ("{'advantages': experience.rewards[:3]}", "'advantages'"),
        ("{'advantages': experience.reward}", "line 5: AttributeError"),
    ],
)
def test_targets_of_a_user_are_tried(write, tmp_path, returned, words):
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import replace\n"
        "from areal_like.algorithms.presets import ALGORITHMS\n"
        "\n"
        "def targets(experience):\n"
        f"    return {returned}\n"
        "\n"
        "def make(config):\n"
        "    return replace(ALGORITHMS['grpo'](config), targets=targets)\n"
    )
    (message,) = errors(write(), f"algorithm={file}:make")
    assert words in message


def test_an_algorithm_of_a_user_is_asked_for_the_models_that_it_needs(write, tmp_path):
    file = tmp_path / "needy.py"
    file.write_text(
        "from dataclasses import replace\n"
        "from areal_like.algorithms.presets import ALGORITHMS\n"
        "\n"
        "def make(config):\n"
        "    return replace(ALGORITHMS['grpo'](config), needs=frozenset({'reference', 'values'}))\n"
    )
    _, findings = find_algorithm(load(write(), [f"algorithm={file}:make"]).config)
    assert [found.key for found in findings] == ["critic", "ref"]
