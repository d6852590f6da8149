"""Every command, YAML and Python in the pages is taken by what it is written for."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
import yaml

from allocation.cli import app as allocation
from areal_like.__main__ import app as areal_like
from areal_like.core.config.load import load
from areal_like.interop.completion import fill_placeholders

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
BASE = ROOT / "examples/math/gsm8k_grpo_cpu.yaml"
MAKE = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXAMPLE = "areal_like.capabilities.long_responses"  # which a test adds to a copy of the tree
PLACEHOLDERS = {"FILE", "my_run.yaml", "run.yaml", "old.yaml", "new.yaml"}  # a user's own configuration


def blocks(language: str) -> Iterator[Any]:
    """Code of one language with its page and line."""
    for page in PAGES:
        text = page.read_text()
        for found in re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            place = f"{page.relative_to(ROOT)}:{text[: found.start()].count(chr(10)) + 1}"
            yield pytest.param(found[1], id=place)


def configured(file: str, overrides: list[str]) -> None:
    """The YAML is there and takes the changes; a user's own stands for an example."""
    path = Path(file.removeprefix("/areal-like/"))
    load(BASE if file in PLACEHOLDERS else ROOT / path, [word for word in overrides if word != "[key=value"])


def taken_by(app: typer.Typer) -> Callable[[list[str]], None]:
    """Reads the words of a command of ours as it does itself."""
    group: Any = typer.main.get_command(app)

    def read(words: list[str]) -> None:
        if not words or words[0].startswith("-"):
            assert words[0].split("=")[0] in {name for option in group.params for name in option.opts}
            return
        context = group.commands[words[0]].make_context(words[0], words[1:])
        if "config" in context.params and not context.params.get("model"):
            configured(str(context.params["config"]), context.params["overrides"] or [])

    return read


def script(words: list[str]) -> None:
    """A Python file of the examples, with a configuration where it is the training script."""
    if words[0] == "-m":
        importlib.import_module(words[1])
        return
    assert (ROOT / words[0]).is_file()
    if words[0].endswith("gsm8k_rl.py"):
        end = [
            word for word in words[words.index("--config") + 2 :] if not re.fullmatch(r"\[?--dry-run\]?|\.\.\.\]", word)
        ]
        configured(words[words.index("--config") + 1], end)
    elif "\ndef main(" in (ROOT / words[0]).read_text():
        app, file = typer.Typer(), ROOT / words[0]
        with mock.patch.object(sys, "path", [str(file.parent), *sys.path]):
            app.command()(runpy.run_path(str(file))["main"])
        typer.main.get_command(app).make_context(words[0], words[1:])


def files(words: list[str]) -> None:
    """What -f names is there."""
    named = [ROOT / after for word, after in pairwise(words) if word == "-f"]
    assert all(file.is_file() for file in named)


def docker(words: list[str]) -> None:
    files(words)
    assert words[0] in ("build", "run")
    if words[0] == "run":
        image = next(number for number, word in enumerate(words) if word.startswith("areal-like:"))
        read(words[image + 1 :])


def sbatch(words: list[str]) -> None:
    words = [word for word in words if not word.startswith("--")]
    assert (ROOT / words[0]).is_file()
    configured(words[1], words[2:])


def make(words: list[str]) -> None:
    assert words[0] in MAKE


def uv(words: list[str]) -> None:
    files = [word for word in words if word.startswith("requirements/")]
    assert words[0] in ("sync", "pip", "install") and all((ROOT / file).is_file() for file in files)


READERS: dict[str, Callable[[list[str]], None]] = {
    "allocation": taken_by(allocation),
    "areal-like": taken_by(areal_like),
    "python": script,
    "docker": docker,
    "kubectl": files,
    "sbatch": sbatch,
    "make": make,
    "uv": uv,
    "pip": uv,
    "python3.12": lambda words: uv(words[words.index("pip") + 1 :]),
    "ray": lambda words: None,
    "export": lambda words: None,
    "source": lambda words: None,
    "git": lambda words: None,
}


def read(words: list[str]) -> None:
    name = words[0].removeprefix(".venv/bin/").removeprefix("requirements/")
    if name == "install":
        assert (ROOT / f"requirements/{words[1]}.txt").is_file()
    else:
        READERS[name](words[1:])


@pytest.mark.parametrize("block", blocks("bash"))
def test_commands_are_taken_by_what_they_start(block: str) -> None:
    for line in block.replace("\\\n", "").splitlines():
        words = shlex.split(line, comments=True)
        for sign in (">", "|"):
            words = words[: words.index(sign)] if sign in words else words
        if words:
            read(words)


@pytest.mark.parametrize("block", blocks("console"))
def test_every_command_that_is_shown_with_its_output_is_of_the_compiler(block: str) -> None:
    for line in re.findall(r"^\$ (.*)", block, re.MULTILINE):
        assert line.startswith("allocation ")  # test_guide compares what it prints
        read(shlex.split(line))


def merged(base: Any, change: Any) -> Any:
    if isinstance(base, dict) and isinstance(change, dict):
        return base | {key: merged(base.get(key), value) for key, value in change.items()}
    return change


@pytest.mark.parametrize("block", blocks("yaml"))
def test_yaml_has_keys_and_values_of_a_run(block: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    text = yaml.safe_dump(merged(yaml.safe_load(BASE.read_text()), yaml.safe_load(block)))
    file.write_text(fill_placeholders(text) if "???" in block else text)  # as migrate leaves what the user has to give
    load(file, [])


@pytest.mark.parametrize("block", blocks("python"))
def test_python_is_python_and_its_imports_are_there(block: str) -> None:
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith(EXAMPLE):
            module = importlib.import_module(str(node.module))
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def test_other_languages_are_not_used() -> None:
    used = {name for page in PAGES for name in re.findall(r"^```(\w+)$", page.read_text(), re.MULTILINE)}
    assert used <= {"bash", "console", "yaml", "python", "text"}
