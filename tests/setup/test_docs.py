"""What the README and the docs tell people to type works, and what they point to is there."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from allocation.families import TRAINED

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BAR = r"(?<!\\)\|"
README = (ROOT / "README.md").read_text()
sys.path.append(str(ROOT / "docs/generate"))
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()


def commands() -> list[str]:
    """The README's shell commands, one line each."""
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    return "".join(blocks).replace("\\\n", "").splitlines()


def run(command: str) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command)
    words = {"allocation": [sys.executable, "-m", "allocation"], "python": [sys.executable]}[words[0]] + words[1:]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize(
    "command", [line for line in commands() if line.startswith("allocation") or "--dry-run" in line]
)
def test_commands_of_the_readme_that_start_nothing_succeed(command):
    result = run(command)
    assert result.returncode == 0, result.stdout + result.stderr


def linked(page: Path) -> list[Path]:
    """What a page links to in this repository."""
    targets = re.findall(r"(?<!!)\[[^\]]*\]\(([^)#]+)[^)]*\)", page.read_text())
    return [(page.parent / target).resolve() for target in targets if "://" not in target]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_pages_and_files_exist(page):
    assert [target for target in linked(page) if not target.exists()] == []


def anchors(page: Path) -> list[str]:
    """The anchors of a page's headings, as GitHub writes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.*)", text, re.MULTILINE)]
    return ["".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_") for title in titles]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_headings_exist_and_long_pages_have_a_table_of_contents(page):
    links = re.findall(r"(?<!!)\[[^\]]*\]\(([^)#\s]*)#([^)]+)\)", page.read_text())
    pages = {name: (page.parent / name).resolve() if name else page for name, _ in links if "://" not in name}
    known = {name: anchors(path) for name, path in pages.items() if path.suffix == ".md"}
    assert [(name, anchor) for name, anchor in links if name in known and anchor not in known[name]] == []
    if page.name != "README.md" and len(page.read_text().splitlines()) > 100:
        assert sum(not name for name, _ in links) >= 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_rows_of_a_table_have_as_many_cells_as_its_head(page):
    """A `|` ends a cell even within code, unless a backslash is before it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for head, *rows in (table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)):
        assert [row for row in rows if len(re.findall(BAR, row)) != len(re.findall(BAR, head))] == []


def test_commands_that_install_with_pip_name_the_python_that_it_accepts():
    """Another version ends in pip's words, which do not say where the right one is."""
    required = re.search(r'requires-python = "==(\d+\.\d+)', (ROOT / "pyproject.toml").read_text())
    assert required
    blocks = [block for page in PAGES for block in re.findall(r"(?s)```bash\n(.*?)```", page.read_text())]
    lines = "\n".join(blocks).splitlines()
    installs = [line for line in lines if "pip install" in line and "uv pip" not in line]
    assert len(installs) >= 3
    assert [line for line in installs if not line.startswith(f"python{required[1]} -m pip install")] == []


def test_every_page_is_reached_by_links_from_the_readme():
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            waiting += linked(page) if page.suffix == ".md" else []
    pages = {page for page in (ROOT / "docs").rglob("*") if page.suffix in (".md", ".ipynb")}
    assert pages
    assert pages - reached == set()


def test_paths_in_the_architecture_exist():
    paths = set(re.findall(r"\b(?:areal_like|allocation|examples|tests)/[\w/]*(?:\.\w+)?", ARCHITECTURE))
    for folder, rest in re.findall(r"^\| `([\w/]+/)` \|(.*)", ARCHITECTURE, re.MULTILINE):
        paths |= {folder + file for file in re.findall(r"`(\w+\.py)`", rest)}
    assert len(paths) > 60
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []


def test_functions_in_the_architecture_are_in_the_files_named_with_them():
    steps = re.findall(r"^ *([\w.]+) +(areal_like/\S+\.py)", ARCHITECTURE, re.MULTILINE)
    assert len(steps) > 10
    for function, file in steps:
        text = (ROOT / file).read_text()
        missing = [name for name in function.split(".") if not re.search(rf"\b(?:def|class) {name}\b", text)]
        assert not missing, file


def test_the_readme_is_short_and_its_make_targets_exist():
    assert len(README.splitlines()) <= 120
    targets = set(
        re.findall(r"\bmake ([a-z-]+)\b(?=[`\n ])", "\n".join([*commands(), *re.findall(r"`(make [a-z-]+)`", README)]))
    )
    defined = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= targets <= defined


@pytest.mark.parametrize(("script", "name"), [("figures", "benchmarks"), ("validation", "validation")])
def test_pages_made_of_result_files_are_current(script, name):
    made = importlib.import_module(script)
    assert (ROOT / f"docs/{name}.md").read_text() == made.page()


def test_the_status_table_of_the_readme_is_current():
    made = importlib.import_module("validation")
    assert made.status(made.DECIDING) in README


def test_the_speeds_of_the_readme_were_measured():
    def result(name: str) -> dict[str, Any]:
        return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())

    files = (ROOT / "benchmarks/results").glob("trainer_throughput*h200*.json")
    trainer = [result(file.stem)["ratio"] for file in files]
    asynchronous = result("async_speed_h200x2")["ratio"]["long_tailed"]["ratio"]
    figures = importlib.import_module("figures")
    pauses = [float(row[2][1:].partition("]")[0]) for row in figures.updates() if row[2].startswith("[")]
    demo = [run["scalars"]["reward/held_out"] for run in result("demo_cpu")["runs"]]
    first, last = ([curve[place][1] for curve in demo] for place in (0, -1))
    curve = {int(step): found["accuracy"] for step, found in result("gsm8k_smollm2")["held_out"].items()}
    arms = result("experts_h200")["arms"].values()
    shares = [arm["seconds_figures"]["share_of_peak"] for arm in arms if arm["grouped"]]
    for claim in (
        f"{curve[0]:.3f} → {curve[40]:.3f} on GSM8K in 40 steps",
        f"trains at {100 * min(shares):.0f} to {100 * max(shares):.0f} % of an H200's peak",
        f"The trainer runs at {min(trainer):.2f} to {max(trainer):.2f} times",
        f"make up to {asynchronous:.2f} times the samples",
        f"agents run at {result('agent_path_cpu')['ratio']:.2f} of the speed",
        f"updated in flight in {min(pauses):.0f} to {max(pauses):.0f} ms",
        f"| reward {fmean(first):.2f} → {min(last):.2f} to {max(last):.2f} |",
        f"[{len(set().union(*TRAINED.values()))} families]",
    ):
        assert claim in " ".join(README.split())
