"""Write `docs/errors.md`, an explanation of each finding's code: `python docs/generate/errors.py`."""

from __future__ import annotations

import runpy
from collections.abc import Iterable
from pathlib import Path

from allocation import codes
from allocation.codes import Explanation
from allocation.registry import RULES
from areal_like.codes import by_subject
from areal_like.exclusions import describe_rows
from areal_like.preflight.exclusions import exclusion_table

PAGE = Path(__file__).parents[1] / "errors.md"
CHAPTERS: dict[str, str] = runpy.run_path(str(Path(__file__).with_name("rules.py")))["CHAPTERS"]
HEAD = """\
# Errors

Generated from `areal_like/codes/` and `allocation/rules/explanations.toml` by `python docs/generate/errors.py`; do not edit.

A finding has a severity, a code, a place, a message and a fix. An error ends the command before a process starts; a warning and a
note do not.

```text
error[CONFIG-UNKNOWN-KEY] in actor.bakend (run.yaml:12): unknown key
  nearest valid: actor.backend
```

`areal-like explain-code CODE` prints an entry of this page, `allocation explain-code CODE` those that begin with `ALLOC-` or
`CONVERT-`. Examples of `RUN-` and `CONFIG-` codes are overrides, one per line, of a small run on the CPU. Paths such as
`models/qwen3-fp8` stand for files of that kind. A table lists the features that exclude each other, by the
exclusion table (`areal_like/preflight/exclusions.py`, `role_exclusions.py`, and the folders of capabilities). [Rules](rules.md) lists the rules of the layout with their sources.

## Contents
"""


def page() -> str:
    """Return the page as Markdown: a table of contents by subject, then an entry for each code."""
    subjects = {**{title: list(entries.values()) for title, entries in by_subject().items()}, **_of_rules()}
    contents = [f"- [{title}](#{_anchor(title)}): {_links(entries)}" for title, entries in subjects.items()]
    chapters = [f"\n## {title}\n{''.join(map(_entry, entries))}" for title, entries in subjects.items()]
    return HEAD + "\n" + "\n".join(contents) + "\n" + "".join(chapters)


def _of_rules() -> dict[str, list[Explanation]]:
    """Return the explanations of the compiler's rules by chapter, as on the page of rules."""
    known = codes.explanations()
    return {
        f"Layout: {title}": [
            known[code] for code, rule in RULES.items() if rule.check.__module__ == f"allocation.{module}"
        ]
        for module, title in CHAPTERS.items()
    }


def _links(entries: Iterable[Explanation]) -> str:
    return ", ".join(f"[{entry.code}](#{_anchor(entry.code)})" for entry in entries)


def _anchor(heading: str) -> str:
    """Return the anchor that GitHub and Sphinx give to a heading."""
    kept = "".join(letter for letter in heading.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")


def _entry(entry: Explanation) -> str:
    example = f"```text\n{entry.example}\n```"
    rows = list(describe_rows(exclusion_table(), entry.code))
    head = ["\n| Not together | Because | Set |", "|---|---|---|"] if rows else []
    table = "".join(
        f"{line}\n"
        for line in [*head, *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)]
    )
    return f"\n### {entry.code}\n\n**{entry.title}.** {entry.cause}\n\n{example}\n\nFix: {entry.fix}\n{table}"


if __name__ == "__main__":
    PAGE.write_text(page())
