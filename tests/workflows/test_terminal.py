"""The tasks of the shell agent: the reference command passes the tests, and others do not."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sandboxes import why_not

from areal_like.config.load import load
from areal_like.workflows.sandbox.backends import Recipe
from areal_like.workflows.sandbox.handle import Sandbox
from areal_like.workflows.sandbox.pool import Pool

FOLDER = Path(__file__).parents[2] / "examples/workflows"
SPEC = importlib.util.spec_from_file_location("terminal_example", FOLDER / "terminal.py")
assert SPEC and SPEC.loader
TERMINAL = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(TERMINAL)
SETTINGS = load(FOLDER / "terminal_cpu.yaml").config.episode.sandbox


def client(*answers: str) -> Any:
    """A client that is given these answers."""
    left = list(answers)

    async def create(**_: object) -> Any:
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=left.pop(0)))])

    return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "bubblewrap")
def test_a_command_is_judged_by_what_it_has_done():
    rows = {row["question"][0]["content"].split()[0]: row for row in TERMINAL.tasks(0, 50, False)}
    assert len(rows) == len(TERMINAL.KINDS)

    async def play(row: dict[str, Any], *answers: str) -> float:
        async with Sandbox(Pool(Recipe.pack(SETTINGS).backend(), 0), SETTINGS) as sandbox:
            return await TERMINAL.run(row, client(*answers), sandbox)

    async def main() -> None:
        for row in rows.values():
            assert await play(row, row["answer"]) == 1.0, row
            assert await play(row, "\0unknown", row["answer"]) == 0.5, row
            assert await play(row, "rm -rf *", "touch a b c d") == 0.0, row

    asyncio.run(main())


def test_the_test_set_has_pairs_of_names_of_its_own():
    def pairs(rows: list[dict[str, Any]]) -> set[str]:
        return {row["answer"] for row in rows if row["answer"][:2] in ("cp", "mv")}

    assert pairs(TERMINAL.test()) and not pairs(TERMINAL.test()) & pairs(TERMINAL.train())
