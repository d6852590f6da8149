"""Write the ends of `docs/coming_from/*.md`: an example as `areal-like migrate` reads it, and all keys."""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path

from areal_like.interop.keys import DEFAULTS, TABLES, TITLES, Entry
from areal_like.interop.migrate import migrate

PUBLISHED = Path(__file__).parents[2] / "benchmarks/results/published_configs.json"
KINDS = {
    "text": "by reinforcement learning on text, agents included",
    "images": "models of images, video, sound or actions",
    "offline": "without sampling: supervised, preferences, reward models, distillation of given texts",
}
FOLDER = Path(__file__).parents[1] / "coming_from"
BEGIN = "<!-- From here on written by `python docs/generate/coming_from.py`; do not edit. -->\n"


def page(system: str) -> str:
    """Return the whole page: the part that is written by hand, then the part that follows from the code."""
    head = (FOLDER / f"{system}.md").read_text().partition(BEGIN)[0].rstrip()
    body = f"{_example(system)}{_published(system)}{_table(system)}"
    titles = re.findall(r"^## (.*)", body, re.MULTILINE)
    contents = "".join(f"- [{title}](#{title.lower().replace(' ', '-')})\n" for title in titles)
    return f"{head}\n\n{BEGIN}\n{contents}{body}"


def _example(system: str) -> str:
    (file,) = (FOLDER / "examples").glob(f"{system}.*")
    done = migrate(file.read_text())
    if done.problems or done.system != system:
        raise ValueError(f"{file} is not read as {system}'s: {done.problems}")
    command = f"areal-like migrate docs/coming_from/examples/{file.name} --verbose > run.yaml"
    why = "a setting changes training" if done.changes else "a value is left to you (`???`)"
    ending = "" if done.ready else f" It exits with code 1, because {why}."
    return f"""
## An example

[{file.name}](examples/{file.name}):

```text
{file.read_text().strip()}
```

becomes, with

```bash
{command}
```

this run:

```yaml
{done.yaml.strip()}
```

and lists every key on stderr, in the [three classes](../coming_from.md#three-classes-of-notes).{ending}

```text
{done.report()}
```
"""


def _published(system: str) -> str:
    """Return how many published files translate with an equal meaning; empty where none were counted."""
    counted = json.loads(PUBLISHED.read_text())["systems"].get(TITLES[system])
    if counted is None:
        return ""
    rows = [f"| {KINDS[kind]} | {n['files']} | {n['equal']} |" for kind, n in counted["kinds"].items()]
    return f"""
## Published example files

The table counts files in {TITLES[system]}'s repository at `{counted["commit"][:10]}`. "Equal" means that the converted run, with the `???`
filled in, trains as the file does. For every other file, `migrate` lists the reasons and ends with exit code 1
([result](../../benchmarks/results/{PUBLISHED.name}), `python -m benchmarks.published_configs`).

| Training | Files | Equal |
|---|---|---|
{chr(10).join(rows)}
"""


def _table(system: str) -> str:
    rows = [(key, _meaning(found)) for key, found in TABLES[system].items()]
    lines = [
        "",
        f"## Defaults of {TITLES[system]} that are written",
        "",
        f"| {TITLES[system]} | default |",
        "|---|---|",
    ]
    lines += [f"| `{key}` | `{value}` |" for key, value in DEFAULTS[system].items()]
    lines += ["", f"## Keys of {TITLES[system]}", "", f"| {TITLES[system]} | here |", "|---|---|"]
    for meaning, some in groupby(sorted(rows, key=lambda row: (row[1], row[0])), key=lambda row: row[1]):
        lines.append(f"| {', '.join(f'`{key}`' for key, _ in some)} | {meaning} |")
    return "\n".join(lines) + "\n"


def _meaning(found: Entry) -> str:
    if found.ours:
        return f"`{found.ours}`"
    if found.together:
        return " and ".join(f"`{key}`" for key in found.together.split(" and ")) + ", together with other keys"
    if found.unneeded:
        return f"unnecessary: {found.unneeded}"
    same = [f"`{value}`" for value in found.same if value not in (None, "")]
    return f"changes training{f', unless it is {" or ".join(same)}' if same else ''}: {found.changes}"


if __name__ == "__main__":
    for name in TITLES:
        (FOLDER / f"{name}.md").write_text(page(name))
