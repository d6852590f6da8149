"""Copies of the source tree, to which a test adds folders, or from which it deletes some."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def copy_tree(folder: Path, *deleted: str) -> Path:
    """Copy what runs and tests need, without the paths that are `deleted`."""
    tree = folder / "tree"
    tree.mkdir()
    for name in ("allocation", "areal_like", "examples", "tests", "docs"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "site", "results"))
    for name in ("pyproject.toml", "README.md", "Makefile"):
        shutil.copy2(ROOT / name, tree / name)
    for name in deleted:
        shutil.rmtree(tree / name)
    return tree


def run_in(tree: Path, *words: str, timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
    """Run Python in a tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout_s)
