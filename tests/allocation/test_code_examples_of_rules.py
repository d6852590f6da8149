"""The example of each explained rule breaks that rule."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

import allocation
from allocation.codes import explanations, read_entries
from allocation.convert import read, write

ENTRIES = read_entries(Path(allocation.__file__).parent / "rules/explanations.toml")
TOO_LONG_TO_SHOW = {"ALLOC-TOO-LONG"}


def findings(entry: dict[str, Any]) -> list[allocation.Finding]:
    """What the compiler says of an example."""
    kinds = {
        "batch": allocation.BatchSpec,
        "megatron": allocation.MegatronSettings,
        "memory": allocation.MemorySettings,
    }
    arguments = {name: entry[name] for name in ("model", "order") if name in entry}
    arguments |= {name: kind(**entry[name]) for name, kind in kinds.items() if name in entry}
    if "cluster" in entry:
        arguments["cluster"] = allocation.Cluster.parse(entry["cluster"])
    if "from" in entry:
        return read(entry["from"], entry["example"])[1]
    if "to" in entry:
        return write(entry["to"], allocation.compile(entry["example"], **arguments))[1]
    with contextlib.chdir(Path(__file__).parent):  # where the odd models lie
        return list(allocation.check(entry.get("fields") or entry["example"], **arguments).findings)


def test_every_rule_is_explained() -> None:
    assert set(explanations()) == set(allocation.RULES)


@pytest.mark.parametrize("code", sorted(set(ENTRIES) - TOO_LONG_TO_SHOW))
def test_the_example_breaks_the_rule(code: str) -> None:
    assert code in {finding.code for finding in findings(ENTRIES[code])}
