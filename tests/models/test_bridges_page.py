import runpy
from pathlib import Path

GENERATOR = runpy.run_path(str(Path(__file__).parents[2] / "docs/generate/bridges.py"))


def test_the_page_is_current():
    assert GENERATOR["PAGE"].read_text() == GENERATOR["page"](), "run `python docs/generate/bridges.py`"


def test_every_family_is_told_of():
    told = GENERATOR["table"]()
    assert all(f"`{family}`" in told for family in GENERATOR["MODELS"]["FAMILIES"])
    assert "| `deepseek_v3` |  | trains, converts |" in told
    assert "| `qwen3` | trains, converts | trains, converts |" in told
