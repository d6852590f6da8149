"""Writes `docs/validation.md`, and the status table of README, from test markers and result files.

A test module says what it covers by `pytest.mark.covers("FSDP", ...)`, a result file by its entry `covers`.
"""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
PARALLEL = ["TP", "PP", "VPP", "CP", "EP", "ETP", "folded attention and expert grids"]
OTHERS = [
    "FSDP", "shared prompts", "LoRA", "PPO with critic", "reference model", "colocated", "time-shared",
    "updates: collective", "updates: disk", "updates: IPC", "updates in flight", "offload", "resume after SIGKILL",
    "server restart", "agents", "sandboxes", "reward model", "distillation", "router replay", "sampling masks",
    "drift alarm", "checkpoint conversion", "images in data, agents, servers",
]  # fmt: skip
FEATURES = PARALLEL + OTHERS
ROWS = {"TP, PP, VPP, CP, EP, ETP, folded grids": PARALLEL, **{feature: [feature] for feature in OTHERS}}
COLUMNS = ("CPU in CI", "1 GPU", "2–4 GPUs", "several hosts")
DECIDING = (  # rows of README
    "TP, PP, VPP, CP, EP, ETP, folded grids",
    "FSDP",
    "updates: IPC",
    "agents",
    "router replay",
    "resume after SIGKILL",
)
KINDS = ("tested", "ran once", "–")
START, END = "<!-- status -->", "<!-- end of status -->"


def main() -> None:
    """Write the page, and the table in README."""
    readme = ROOT / "README.md"
    head, _, rest = readme.read_text().partition(START)
    if rest:
        tail = rest.partition(END)[2]
        readme.write_text(f"{head}{START}\n{status(DECIDING)}{END}{tail}")
    (ROOT / "docs/validation.md").write_text(page())


def status(chosen: Collection[str] = tuple(ROWS)) -> str:
    """Return the status table of the chosen rows."""
    cells = evidence()
    rows = []
    for row in chosen:
        found = ([cell(cells[feature][column]) for feature in ROWS[row]] for column in COLUMNS)
        rows.append(f"| {row} | {' | '.join(max(each, key=KINDS.index) for each in found)} |")  # the least of several
    return "\n".join(["| | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS), *rows, ""])


def cell(found: list[str]) -> str:
    """Return `tested` for tests, `ran once` for result files of runs, and a dash for nothing."""
    if any(name.startswith("tests/") for name in found):
        return "tested"
    return "ran once" if found else "–"


def evidence() -> dict[str, dict[str, list[str]]]:
    """Return test modules and result files by feature and column. Raises ValueError for an unknown feature."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for module, features in covered_by_tests():
        column = "several hosts" if module.startswith("tests/hosts/") else "CPU in CI"
        for feature in features:
            found[feature][column].append(module)
    for name, result in results():
        for entry in result.get("tests", [result]):
            column = column_of(name, entry)
            for feature in entry.get("covers", ()):
                found[feature][column].append(entry.get("module", f"benchmarks/results/{name}"))
    if unknown := found.keys() - set(FEATURES):
        raise ValueError(f"unknown features: {', '.join(sorted(unknown))}; known are {', '.join(FEATURES)}")
    return found


def covered_by_tests() -> Iterator[tuple[str, list[str]]]:
    """Yield test modules that run without a GPU, and what they cover."""
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        text = file.read_text()
        marks = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and is_covers(node.func)]
        features = [str(ast.literal_eval(argument)) for mark in marks for argument in mark.args]
        if features and not file.stem.endswith("_gpu"):
            yield str(file.relative_to(ROOT)), features


def is_covers(function: ast.expr) -> bool:
    """Whether an expression is `pytest.mark.covers`."""
    return isinstance(function, ast.Attribute) and function.attr == "covers"


def results() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every result file by name."""
    for file in sorted(RESULTS.glob("*.json")):
        found = json.loads(file.read_text())
        if isinstance(found, dict):
            yield file.name, found


def column_of(name: str, result: dict[str, Any]) -> str:
    """Return the column of a result by the number of its GPUs."""
    return "CPU in CI" if not (gpus := gpus_of(name, result)) else "1 GPU" if gpus == 1 else "2–4 GPUs"


def gpus_of(name: str, result: dict[str, Any]) -> int:
    """Return how many GPUs a result was measured on: its own entry, or what its file's name says (`h200x2`)."""
    if "gpus" in result:
        return int(result["gpus"])
    if found := re.search(r"h[12]00x(\d)", name):
        return int(found[1])
    return int("NVIDIA" in json.dumps(result.get("device")))


def page() -> str:
    """Return the page."""
    cells = evidence()
    lines = [HEAD, status(), "## Evidence", "", "| Feature | Where | Evidence |", "|---|---|---|"]
    for feature in FEATURES:
        for column in COLUMNS:
            if names := cells[feature][column]:
                links = ", ".join(f"[{Path(name).name}](../{name})" for name in dict.fromkeys(names))
                lines.append(f"| {feature} | {column} | {links} |")
    lines += ["", "## Result files", "", "| File | Device | Commit | Claim or command |", "|---|---|---|---|"]
    for name, result in results():
        lines.append(
            f"| [{name}](../benchmarks/results/{name}) | {device(name, result)} | {commit(result)} | {claim(result)} |"
        )
    return "\n".join(lines) + "\n"


def device(name: str, result: dict[str, Any]) -> str:
    """Return a device in a few words."""
    gpus, found = gpus_of(name, result), result.get("device")
    if gpus:
        kind = "H100" if "H100" in json.dumps(found) else "H200"
        return f"{gpus} × {kind}"
    cpus = found.get("cpus") if isinstance(found, dict) else result.get("cores", 2)
    return f"CPU, {cpus} cores"


def commit(result: dict[str, Any]) -> str:
    """Return the commit, or a dash."""
    return str(result.get("commit", "–")).split()[0]


def claim(result: dict[str, Any]) -> str:
    """Return what a result shows, or the command that made it, in one line."""
    text = result.get("claim") or f"`{re.sub(r'\\s+', ' ', str(result.get('command', '')))}`"
    text = text.replace("|", "\\|")
    return text if len(text) <= 160 else f"{text[:156].rstrip()} …" + ("`" if text.startswith("`") else "")


HEAD = """# Validation

What is tested, and where. `tested`: a test covers it there (CI runs on CPU; the tests for GPUs ran by hand, on the devices and at the
commits of their records). `ran once`: a run or a measurement is on record. `–`: not tried. Several hosts are CPU hosts of network
namespaces on one machine ([clusters](clusters.md#what-was-tested)).
`python docs/generate/validation.py` writes this page from the markers of the tests and the files in `benchmarks/results/`.

- [Status](#status)
- [Evidence](#evidence)
- [Result files](#result-files)

## Status
"""

if __name__ == "__main__":
    main()
