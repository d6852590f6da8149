"""Copies of the source tree, to which a test adds folders, or from which it deletes some."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SEVERAL = """
import json, sys
from typer.testing import CliRunner
from areal_like.__main__ import app
asked = (CliRunner().invoke(app, words, prog_name="areal-like") for words in json.loads(sys.argv[1]))
print(json.dumps([(answer.exit_code, answer.stdout, answer.stderr) for answer in asked]))
"""


def copy_tree(folder: Path, *deleted: str) -> Path:
    """Copy what runs and tests need, compiled modules too, without the paths that are `deleted`."""
    tree = folder / "tree"
    tree.mkdir()
    for name in ("allocation", "areal_like", "examples", "tests", "docs"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("site", "results"))
    for name in ("pyproject.toml", "README.md", "Makefile"):
        shutil.copy2(ROOT / name, tree / name)
    for name in deleted:
        shutil.rmtree(tree / name)
    return tree


def add_folder(tree: Path, name: str, files: Mapping[str, str]) -> None:
    """Add a package to a tree."""
    (tree / name).mkdir()
    for file, text in {"__init__.py": "", **files}.items():
        (tree / name / file).write_text(text)


def run_in(tree: Path, *words: str, timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
    """Run Python in a tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout_s)


def ask_in(tree: Path, *commands: Sequence[str]) -> list[tuple[int, str, str]]:
    """Run commands of `areal-like` in one process in a tree; return exit code, output and errors of each."""
    asked = run_in(tree, "-c", SEVERAL, json.dumps(commands))
    assert asked.returncode == 0, asked.stderr
    return [tuple(answer) for answer in json.loads(asked.stdout.splitlines()[-1])]
