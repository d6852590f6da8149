"""The syntax tree of a shell script, by shfmt: the parser of mvdan/sh, which runs nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import Any

type Node = dict[str, Any]

_LONGEST_S = 30


class ShellSyntaxError(ValueError):
    """Text that Bash would reject: the reason, and the position where it stands."""

    def __init__(self, reason: str, place: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.place = place


@lru_cache(maxsize=8)
def parse(text: str) -> Node:
    """Return the syntax tree of a script; positions count characters. Raises ShellSyntaxError."""
    try:
        done = subprocess.run(
            [_program(), "--to-json", "-ln", "bash"],
            input=text.encode(errors="replace"),
            capture_output=True,
            timeout=_LONGEST_S,
            check=False,
        )
        if done.returncode:
            raise _error(text, done.stderr.decode(errors="replace"))
        tree: Node = json.loads(done.stdout)
        if not text.isascii():
            _count_characters(tree, text)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ShellSyntaxError(f"shfmt, which parses shell scripts, failed: {error}") from error
    except RecursionError as error:
        raise ShellSyntaxError("the script is nested too deeply") from error
    return tree


def _program() -> str:
    own = Path(sysconfig.get_path("scripts"), "shfmt")
    found = str(own) if own.is_file() else shutil.which("shfmt")
    if found is None:
        raise ShellSyntaxError("shfmt, which parses shell scripts, is not installed: pip install shfmt-py")
    return found


def _error(text: str, complaint: str) -> ShellSyntaxError:
    first = complaint.strip().partition("\n")[0]
    match = re.search(r"(\d+):(\d+): (.*)", first)
    if match is None:
        return ShellSyntaxError(f"the text is not a shell script: {first}")
    line, column, reason = int(match[1]), int(match[2]), match[3]
    before = sum(len(each) for each in text.splitlines(keepends=True)[: line - 1])
    return ShellSyntaxError(f"line {line} is not valid Bash: {reason}", min(before + column - 1, len(text)))


def _count_characters(tree: Node, text: str) -> None:
    """Change the offsets of a tree from bytes to characters."""
    places: list[int] = []
    for place, character in enumerate(text):
        places += [place] * len(character.encode(errors="replace"))
    places.append(len(text))
    nodes: list[Any] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            if isinstance(node.get("Offset"), int):
                node["Offset"] = places[min(node["Offset"], len(places) - 1)]
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node


def start_of(node: Node) -> int:
    """Return the position of a node's first character."""
    return int(node["Pos"]["Offset"])


def end_of(node: Node) -> int:
    """Return the position behind a node's last character."""
    return int(node["End"]["Offset"])


def line_of(node: Node) -> int:
    """Return the line of a node, counted from 1."""
    return int(node["Pos"]["Line"])
