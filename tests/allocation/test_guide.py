"""The guide's commands print what the guide shows. `python -m tests.allocation.test_guide` rewrites the outputs."""

import contextlib
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from allocation.cli import app

ROOT = Path(__file__).parents[2]
GUIDE, README = ROOT / "docs" / "allocation.md", ROOT / "README.md"
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


def commands(block):
    return re.findall(r"^\$ (allocation .*)$", block, re.MULTILINE)


def answer(command):
    _, *words = shlex.split(command)
    with contextlib.chdir(ROOT):
        result = CliRunner(env={"COLUMNS": "80"}).invoke(app, words, prog_name="allocation")
    assert result.exit_code in (0, 1), result.output
    return "\n".join(line.rstrip() for line in f"$ {command}\n{result.output}".splitlines()) + "\n"


SHOWN = [block for page in (README, GUIDE) for block in BLOCK.findall(page.read_text())]


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: commands(block)[0])
def test_guide_shows_what_commands_print(block):
    assert block == "".join(map(answer, commands(block)))


def test_every_command_of_the_guide_is_run():
    outside = BLOCK.sub("", GUIDE.read_text())
    assert set(re.findall(r"\ballocation --?[a-z-]+|^\$ .*", outside, re.MULTILINE)) == {
        "allocation --install-completion"
    }
    used = {command.split()[1] for block in BLOCK.findall(GUIDE.read_text()) for command in commands(block)}
    assert used == {"check", "explain", "count", "groups", "convert", "format"}


if __name__ == "__main__":
    from allocation import readers
    from tests.allocation.conftest import declared

    readers.entry_points = declared
    for page in (README, GUIDE):
        page.write_text(
            BLOCK.sub(lambda match: f"```console\n{''.join(map(answer, commands(match[1])))}```", page.read_text())
        )
