"""The table of capabilities, and the file of their keys, are current."""

from __future__ import annotations

import runpy
from pathlib import Path

GENERATOR = runpy.run_path(str(Path(__file__).parents[2] / "docs/generate/capabilities.py"))


def test_the_table_and_the_keys_are_current() -> None:
    assert GENERATOR["PAGE"].read_text() == GENERATOR["page"](), "run `python docs/generate/capabilities.py`"
    assert GENERATOR["KEYS"].read_text() == GENERATOR["keys_file"](), "run `python docs/generate/capabilities.py`"
