"""Writes `docs/python.md`, what the packages give to Python code, from signatures and docstrings."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

from areal_like.core.registry import find_modules

PAGE = Path(__file__).parents[1] / "python.md"
HEAD = """\
# Python

Generated from the code by `python docs/generate/python.py`; do not edit. Functions raise only the
exceptions that they document.
"""
CHAPTERS = {
    "A run": {"areal_like": ["train", *(name for _, module in find_modules("interface") for name in module.INTERFACE)]},
    "Types of rewards, workflows and algorithms": {
        "areal_like.core.types": ["Prompt", "Reward", "Trajectory", "FinishReason"],
        "areal_like.core.algorithms.types": ["Algorithm", "Experience"],
    },
    "The allocation compiler": {"allocation": []},  # all that it names in __all__
    "Other systems' settings": {"allocation.convert": ["read", "write"]},
}


def page() -> str:
    """Return the page as Markdown."""
    parts = [HEAD, "\n", *(f"- [{title}](#{_anchor(title)})\n" for title in CHAPTERS)]
    for title, modules in CHAPTERS.items():
        parts.append(f"\n## {title}\n")
        for name, chosen in modules.items():
            module = importlib.import_module(name)
            parts += [_entry(f"{name}.{word}", getattr(module, word)) for word in chosen or sorted(module.__all__)]
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", PAGE.name, "-"]
    return subprocess.run(command, input="".join(parts), capture_output=True, text=True, check=True).stdout


def _anchor(title: str) -> str:
    """Return the anchor of a heading, as GitHub writes it."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c == "-")


def _entry(name: str, thing: Any) -> str:
    if not (inspect.isfunction(thing) or inspect.isclass(thing)):
        return f"\n### {name}\n\nA {type(thing).__name__}.\n"
    node = ast.parse(dedent(inspect.getsource(thing))).body[0]
    code = "\n".join(_lines(node))
    return f"\n### {name}\n\n```python\n{code}\n```\n\n{inspect.getdoc(thing) or ''}\n"


def _lines(node: ast.AST) -> Iterator[str]:
    """Yield the definition of a function, or of a class with fields and public methods."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            if any(isinstance(mark, ast.Name) and mark.id == "property" for mark in node.decorator_list):
                yield f"{node.name}: {returns.removeprefix(' -> ')}"
            else:
                yield f"{kind} {node.name}({ast.unparse(node.args)}){returns}: ..."
        case ast.ClassDef():
            bases = ", ".join(map(ast.unparse, node.bases))
            yield f"class {node.name}({bases}):" if bases else f"class {node.name}:"
            inner = [line for part in node.body if _is_public(part) for line in _lines(part)]
            yield from (f"    {line}" for line in inner or ["..."])
        case ast.AnnAssign() | ast.Assign():
            yield ast.unparse(node)


def _is_public(node: ast.AST) -> bool:
    target = getattr(node, "target", None) or next(iter(getattr(node, "targets", [])), None)
    name = getattr(node, "name", None) or getattr(target, "id", None)
    return name is not None and (not name.startswith("_") or name == "__call__")


if __name__ == "__main__":
    PAGE.write_text(page())
