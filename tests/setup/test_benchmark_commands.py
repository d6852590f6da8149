"""Commands of benchmarks that no machine has run yet are ones that their scripts accept."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import typer

from areal_like.core.config.load import load
from benchmarks import memory

ROOT = Path(__file__).parents[2]
NOT_RUN = (ROOT / "docs/benchmarks.md").read_text().partition("## Not run yet")[2]
COMMANDS = re.findall(r"\| `([^`]+)` \|$", NOT_RUN, re.MULTILINE)


def test_some_are_listed() -> None:
    assert len(COMMANDS) >= 3


@pytest.mark.parametrize("command", COMMANDS)
def test_a_script_accepts_its_command(command: str) -> None:
    words = shlex.split(command)
    if words[:2] == ["areal-like", "run"]:
        assert not [found for found in load(ROOT / words[2], words[3:]).warnings if found]
        return
    assert words[:2] == ["python", "-m"]
    module = import_module(words[2])
    if hasattr(module, "app"):  # several commands
        command = typer.main.get_command(module.app).commands[words[3]]
        parsed = command.make_context(words[3], words[4:])
    else:
        app = typer.Typer()
        app.command()(module.main)
        parsed = typer.main.get_command(app).make_context(words[2], words[3:])
    if "config" in parsed.params and "overrides" in parsed.params:
        load(ROOT / parsed.params["config"], parsed.params["overrides"] or [])
    for shape in filter(None, (parsed.params.get("shape"), *str(parsed.params.get("shapes") or "").split(","))):
        assert shape in (getattr(module, "SHAPES", None) or memory.SHAPES)
