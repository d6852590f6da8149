"""The batched attention gives what SGLang's own loop gives, in fewer calls; what it does not cover goes to the loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROUNDING = 5e-7  # of float32 at the outputs' size, about 1
# One sequence at a time, or of a mask that SGLang's loop does not have
ALONE = {"decode one", "extend one", "extend one, prefix", "extend, images", "extend, images beyond a window"}


@pytest.fixture(scope="module")
def comparisons() -> dict[str, dict[str, Any]]:
    command = [sys.executable, str(Path(__file__).with_name("compare_attention.py"))]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=900)
    return json.loads(result.stdout.splitlines()[-1])


def test_same_results(comparisons: dict[str, dict[str, Any]]) -> None:
    wrong = {name: case for name, case in comparisons.items() if case["difference"] > ROUNDING}
    assert comparisons
    assert not wrong


def test_fewer_calls_for_many_sequences(comparisons: dict[str, dict[str, Any]]) -> None:
    many = {name: case for name, case in comparisons.items() if name not in ALONE and not name.startswith("left")}
    assert many
    assert not {name: case for name, case in many.items() if case["calls"] * 1.1 > case["loop_calls"]}


def test_leaves_other_attention_to_the_loop(comparisons: dict[str, dict[str, Any]]) -> None:
    left = {name: case for name, case in comparisons.items() if name.startswith("left")}
    assert left
    assert all(case["difference"] == 0 and case["calls"] == case["loop_calls"] for case in left.values())


def test_bounds_the_size_of_a_call(comparisons: dict[str, dict[str, Any]]) -> None:
    assert comparisons["extend, chunks"]["calls"] > comparisons["extend, unbounded"]["calls"]
    assert comparisons["decode, chunks"]["calls"] > comparisons["decode, unbounded"]["calls"]
