"""The tasks of the shell agent: the reference command passes the tests, and others do not."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from running import ROOT, SCRIPT
from sandboxes import opened, why_not

from areal_like.core.config.load import load

FOLDER = ROOT / "examples/workflows"
SPEC = importlib.util.spec_from_file_location("terminal_example", FOLDER / "terminal.py")
assert SPEC and SPEC.loader
TERMINAL = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(TERMINAL)
SETTINGS = load(FOLDER / "terminal_cpu.yaml").config.episode.sandbox


def client(answer: str) -> Any:
    """Return a client that is given this answer."""

    async def create(**_: object) -> Any:
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=answer))])

    return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "bubblewrap")
def test_a_command_is_judged_by_what_it_has_done():
    right, wrong = ({kind(row): row for row in TERMINAL.tasks(0, 50, False, share)} for share in (0.0, 1.0))
    assert len(right) == len(wrong) == len(TERMINAL.KINDS)

    async def play(row: dict[str, Any], answer: str) -> float:
        async with opened(SETTINGS) as sandbox:
            return await TERMINAL.run(row, client(answer), sandbox)

    async def main() -> None:
        for name, row in right.items():
            assert await play(row, row["answer"]) == 1.0, row
            assert await play(wrong[name], wrong[name]["answer"]) == 0.0, wrong[name]
            assert await play(row, "\0unknown") == await play(row, "rm -rf *") == 0.0, row

    asyncio.run(main())


def kind(row: dict[str, Any]) -> str:
    """Return the first word of a task."""
    return str(row["question"][0]["content"].split()[0])


def test_the_test_set_has_pairs_of_names_of_its_own():
    def pairs(rows: list[dict[str, Any]]) -> set[str]:
        return {row["question"][0]["content"] for row in rows if kind(row) in ("copy", "move")}

    assert pairs(TERMINAL.test()) and not pairs(TERMINAL.test()) & pairs(TERMINAL.train())


@pytest.mark.long
@pytest.mark.covers("sandboxes")
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "bubblewrap")
def test_the_agent_learns(tmp_path: Path) -> None:
    """Imitation solves two tasks of five, because of its wrong references; the tests of files teach the others."""
    config, where = FOLDER / "terminal_cpu.yaml", (f"cluster.fileroot={tmp_path}", "trial_name=run")
    command = [sys.executable, str(SCRIPT), "--config", str(config), *where]
    subprocess.run(command, cwd=ROOT, check=True)
    rows = map(json.loads, (tmp_path / "terminal/run/metrics.jsonl").read_text().splitlines())
    rewards = [row["reward/held_out"] for row in rows if "reward/held_out" in row]
    assert rewards[0] < 0.6 and rewards[-1] > rewards[0] + 0.1, rewards
