"""Write `docs/rules.md`, the list of all rules, from the code: `python docs/generate/rules.py`."""

from __future__ import annotations

from pathlib import Path

import allocation.convert  # noqa: F401  (registers the rules of conversions, and with them all others)
from allocation.registry import RULES, Rule

PAGE = Path(__file__).parents[1] / "rules.md"

DROPPED = str.maketrans("", "", ",'")  # from the anchor of a heading, as GitHub writes it
CHAPTERS = {
    "rules.syntax": "Text and syntax",
    "rules.words": "Words",
    "rules.roles": "Names and roles",
    "rules.grid": "Grids of trainers and servers",
    "rules.placement": "Cluster, colocation and GPU ids",
    "rules.model": "Model",
    "rules.options": "Megatron options",
    "rules.batch": "Batch",
    "rules.memory": "Memory",
    "convert.rules": "Other systems' settings",
}


def page() -> str:
    """Return the page as Markdown, with a chapter for each module of rules."""
    lines = [
        "# Rules of the allocation compiler",
        "",
        "Generated from the registered rules by `python docs/generate/rules.py`; do not edit.",
        "An error forbids a plan, a warning and a note do not.",
        "",
        *(f"- [{title}](#{title.lower().replace(' ', '-').translate(DROPPED)})" for title in CHAPTERS.values()),
    ]
    for module, title in CHAPTERS.items():
        rules = [rule for rule in RULES.values() if rule.check.__module__ == f"allocation.{module}"]
        lines += ["", f"## {title}", "", "| Code | Kind | Rule | Megatron's name | Source |", "|---|---|---|---|---|"]
        lines += map(_row, rules)
    return "\n".join(lines) + "\n"


def _row(rule: Rule) -> str:
    name = f"`{rule.megatron}`" if rule.megatron else ""
    cells = (f"`{rule.code}`", rule.severity.value, rule.reason, name, rule.source)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page())
