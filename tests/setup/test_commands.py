"""What `areal-like COMMAND --help` gives as examples are commands that it takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from areal_like.commands import app
from areal_like.config.load import load

ROOT = Path(__file__).parents[2]
GROUP = typer.main.get_command(app)


def ask(*words: str) -> str:
    result = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(app, words, prog_name="areal-like")
    assert result.exit_code == 0, result.output
    return result.stdout


def examples(text: str) -> list[list[str]]:
    """The words after `areal-like` of each line under `Examples:`."""
    found = re.findall(r"^ +areal-like (.+?) *$", text.partition("Examples:")[2].partition("╭")[0], re.MULTILINE)
    return [shlex.split(line.partition(" > ")[0]) for line in found]


def names() -> list[str]:
    return list(GROUP.commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", names())
def test_every_command_teaches_by_examples_that_it_takes(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = examples(ask(command, "--help"))
    assert found
    for name, *words in found:
        assert name == command
        context = GROUP.commands[command].make_context(command, list(words))  # type: ignore[attr-defined]
        if command in ("run", "check"):
            load(context.params["config"], context.params["overrides"] or [])


def test_the_first_help_names_what_to_begin_with() -> None:
    text = ask("--help")
    assert [words[0] for words in examples(text)] == ["check", "run", "report"]
    assert set(names()) <= set(re.findall(r"[\w-]+", text))
