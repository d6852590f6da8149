"""No check loops over a number that the user gives, nor makes as many of something."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from limits import HUNG_S

HEADS = "actor.init_model.num_attention_heads"


MORE = [f"{HEADS}=9999999999998", "actor.init_model.num_experts=9999999999998"]


@pytest.mark.parametrize(
    ("nth", "others"), [(4, []), *(pytest.param(1, it, marks=pytest.mark.long) for it in ([], MORE))]
)
def test_a_huge_number_is_checked_at_once(write: Callable[[], Path], nth: int, others: list[str]):
    program = Path(__file__).with_name("huge_numbers.py")
    command = [sys.executable, str(program), str(write()), str(nth), *others]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=HUNG_S)
    except subprocess.TimeoutExpired as hung:
        pytest.fail(f"the check of {(hung.stdout or b'').decode().splitlines()[-1]} does not end")
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.splitlines()[-1].removesuffix(" numbers")) > 100 // nth
