"""Writes `docs/rules.md`, the list of all rules, from the code: `python -m allocation.rules.page`."""

from __future__ import annotations

from pathlib import Path

import allocation  # registers every rule
import allocation.targets  # and those of conversions
from allocation.diagnostics import RULES, Rule

PAGE = Path(allocation.__file__).parents[1] / "docs" / "rules.md"

CHAPTERS = {
    "Text and syntax": ("text", "syntax", "syntax else"),
    "Words": ("word", "roles", "field"),
    "Grids of a trainer": ("trainer",),
    "Servers": ("server", "server model"),
    "Cluster, colocation and GPU ids": ("star", "star room", "world", "placement", "placed"),
    "Model": ("model file", "model", "trainer model"),
    "Megatron options": ("settings", "settings model"),
    "Batch": ("batch", "good batch", "settings batch", "batch model"),
    "Reading other systems' settings": (
        "convert text",
        "convert nothing",
        "convert missing",
        "convert value",
        "convert devices",
        "convert backend",
        "convert world",
        "convert servers",
        "convert gpus",
        "convert read as",
        "convert unread",
    ),
    "Writing other systems' settings": (
        "convert unwritable",
        "convert lost engine",
        "convert lost backend",
        "convert lost sizes",
        "convert lost gpus",
        "convert lost order",
    ),
    "A run's YAML": ("run", "run value", "run override"),
}


def page() -> str:
    """The page as Markdown. Raises `KeyError` when a rule's scope belongs to no chapter."""
    chapter_of = {scope: chapter for chapter, scopes in CHAPTERS.items() for scope in scopes}
    chapters: dict[str, list[Rule]] = {chapter: [] for chapter in CHAPTERS}
    for rule in RULES.values():
        chapters[chapter_of[rule.scope]].append(rule)
    lines = [
        "# Rules of the allocation compiler",
        "",
        "Generated from `allocation/` by `python -m allocation.rules.page`; do not edit.",
        "An error forbids a plan, a warning and a note do not.",
    ]
    for chapter, rules in chapters.items():
        lines += ["", f"## {chapter}", "", "| Code | Kind | Rule | Megatron's name | Source |", "|---|---|---|---|---|"]
        lines += map(_row, rules)
    return "\n".join(lines) + "\n"


def _row(rule: Rule) -> str:
    name = f"`{rule.megatron}`" if rule.megatron else ""
    cells = (f"`{rule.code}`", rule.severity.value, rule.reason, name, rule.source)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page())
