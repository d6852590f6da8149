import runpy
from pathlib import Path

from allocation.families import FAMILIES, TRAINED

GENERATOR = runpy.run_path(str(Path(__file__).parents[2] / "docs/generate/models.py"))


def test_the_page_is_current_and_agrees_with_the_families_that_train():
    page = GENERATOR["page"]()
    assert GENERATOR["PAGE"].read_text() == page, "run `python docs/generate/models.py`"
    rows = {
        row[0].strip("`"): row[1:] for row in map(cells, page.splitlines()) if row and row[0].strip("`") in FAMILIES
    }
    assert rows.keys() == FAMILIES.keys()
    for family, (mbridge, megatron_bridge, fsdp, *_) in rows.items():
        on_megatron = any(cell.startswith("tested") for cell in (mbridge, megatron_bridge))
        assert on_megatron == (family in TRAINED["megatron"]), family
        assert (fsdp in ("tested", "accepted")) == (family in TRAINED["fsdp"]), family


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]
