"""Writes `docs/commands.md`, every command with its options and examples, from the commands themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any

import typer

import allocation.cli
import areal_like.__main__

PAGE = Path(__file__).parents[1] / "commands.md"
HEAD = """\
# Commands

Generated from the commands' own help by `python docs/generate/commands.py`; do not edit. Both complete words in a shell, model
names included: `areal-like --install-completion`, `allocation --install-completion`.
"""


def page() -> str:
    """Return the page as Markdown."""
    parts = _command("areal-like", areal_like.__main__.app) + _command("allocation", allocation.cli.app)
    titles = [title for part in parts for title in re.findall(r"^### (.*)", part, re.MULTILINE)]
    return (
        HEAD + "\n" + " · ".join(f"[{title}](#{title.replace(' ', '-')})" for title in titles) + "\n" + "".join(parts)
    )


def _command(name: str, app: typer.Typer) -> list[str]:
    group: Any = typer.main.get_command(app)
    parts = [f"\n## {name}\n\n{_help(group.help)}"]
    for word, command in group.commands.items():
        parts.append(f"\n### {name} {word}\n\n{_help(command.help)}")
        parts.append("\n| | | |\n|---|---|---|\n" + "".join(_rows(command)))
    return parts


def _help(text: str) -> str:
    """Return what a command does, and its examples as code."""
    says, _, examples = cleandoc(text.replace("\b", "")).partition("Examples:")
    lines = "\n".join(line.strip() for line in examples.strip().splitlines())
    return f"{re.sub(r'\n{3,}', '\n\n', says.strip())}\n\n```bash\n{lines}\n```\n"


def _rows(command: Any) -> Iterator[str]:
    context = command.make_context(command.name, [], resilient_parsing=True)
    for option in command.params:
        names, kind = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts]), ""
        if option.param_type_name == "argument":
            names = f"`{option.metavar or option.name}`"
        elif not option.is_flag:
            kind = option.metavar or option.display_type(context).strip("<>")
        shown = option.default not in (None, False, ()) and not option.required and not option.secondary_opts
        default = f" Default: {option.default}." if shown else ""
        cells = (names, kind, (option.help or "") + default)
        yield f"| {' | '.join(cell.replace('|', '\\|') for cell in cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
