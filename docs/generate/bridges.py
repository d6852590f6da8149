"""Write the table of `docs/bridges.md` from the models of `tests/models`: `python docs/generate/bridges.py`."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from areal_like.backends.megatron.bridges.support import BRIDGES, converting_bridges

PAGE = Path(__file__).parents[1] / "bridges.md"
MODELS = runpy.run_path(str(Path(__file__).parents[2] / "tests/models/tiny_models.py"))
BEGIN, END = "<!-- by docs/generate/bridges.py -->\n", "<!-- end -->"


def page() -> str:
    """Return the page with a new table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


def table() -> str:
    """Return a row for each family that a bridge supports, and the names of the others."""
    held = {family: converting_bridges({"model_type": family}) for family in MODELS["FAMILIES"]}
    lines = ["| Family | mbridge | Megatron Bridge | Rotary embeddings | Also trained with | Rejected with |"]
    lines += ["|---|---|---|---|---|---|", *(_row(family, bridges) for family, bridges in held.items() if bridges)]
    others = ", ".join(f"`{family}`" for family, bridges in held.items() if not bridges)
    return "\n".join([*lines, "", f"Rejected by both, because no test covers them: {others}.", ""])


def _row(family: str, bridges: list[str]) -> str:
    variants = [variant for variant in MODELS["VARIANTS"].values() if variant.family == family]
    trained = {bridge for variant in variants for bridge in variant.bridges}
    works = ["trains, converts" if name in trained else "converts" if name in bridges else "" for name in BRIDGES]
    good = [variant.fields for variant in variants if variant.bridges]
    bad = [variant.fields for variant in variants if not variant.bridges] if trained else []
    ropes = [_rope_type(fields["rope_parameters"]) for fields in good if "rope_parameters" in fields]
    cells = [f"`{family}`", *works, _listed(["default", *ropes] if trained else []), _fields(good), _fields(bad)]
    return "| " + " | ".join(cells) + " |"


def _rope_type(rope: dict[str, Any]) -> str:
    """Return the kind of a rope, or of that of layers without a window."""
    kind: str = rope.get("full_attention", rope)["rope_type"]
    return kind


def _fields(settings: Iterable[dict[str, Any]]) -> str:
    """Return the fields of config.json that were set together, without those that have their own column or line."""
    apart = ("rope_parameters", "quantization_config")
    plain = [{name: value for name, value in fields.items() if name not in apart} for fields in settings]
    return _listed(", ".join(f"{name}: {json.dumps(value)}" for name, value in one.items()) for one in plain if one)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


if __name__ == "__main__":
    PAGE.write_text(page())
