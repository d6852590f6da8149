"""The table of measured presets is the file's."""

import runpy
from pathlib import Path

GENERATOR = runpy.run_path(str(Path(__file__).parents[2] / "docs/generate/presets.py"))


def test_the_table_is_of_the_figures():
    page = GENERATOR["page"]()
    assert GENERATOR["PAGE"].read_text() == page, "run `python docs/generate/presets.py`"
