"""Write the tables of measured memory and step times in docs/memory_and_planning.md from benchmarks/results/."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from benchmarks import planner
from benchmarks.memory import errors, measured
from benchmarks.report import ROOT

PAGE = Path(__file__).parents[1] / "memory_and_planning.md"
ESTIMATORS = ROOT / "benchmarks/results/estimators.json"
PHASES = ("forward and backward", "log-probs", "load", "weight update")


def phases() -> str:
    """A row for each phase: what the memory model of today says of everything that was measured."""
    cases = measured()
    found, layouts = errors(cases), dict.fromkeys(f"`{case['layout'].removeprefix('megatron:')}`" for case in cases)
    rows = _table("Phase", ((phase, [error for error, _ in found[phase]]) for phase in PHASES))
    return f"{len(cases)} cases in the layouts {', '.join(layouts)}:\n\n{rows}"


def estimators() -> str:
    """A row for each estimator of the file, ours first."""
    cases = json.loads(ESTIMATORS.read_text())["cases"]
    found = {name: [case["bytes"][name] / case["measured"] - 1 for case in cases] for name in cases[0]["bytes"]}
    return _table(f"Peak of {len(cases)} cases, by", found.items())


def layouts() -> str:
    """Measured and predicted seconds of a step of each layout, quickest first."""
    lines = ["| Layout | Measured, s | Predicted, s |", "|---|---|---|"]
    correlations = []
    for kind, found in planner.measured(planner.MEASURED).items():
        correlations.append(f"{found['rank_correlation']:.2f} ({kind})")
        for one in found["layouts"]:
            layout = one["layout"].replace("|", r"\|")
            lines.append(f"| `{layout}` | {one['measured_s']:.2f} | {one['predicted_s']:.2f} |")
    return "\n".join([f"Spearman's rank correlation: {', '.join(correlations)}.", "", *lines]) + "\n"


def page() -> str:
    """The page with the tables of today."""
    text = PAGE.read_text()
    for name, table in (("phases", phases()), ("estimators", estimators()), ("planner", layouts())):
        begin, end = f"<!-- {name} by `python docs/generate/memory.py` -->\n", f"<!-- end of {name} -->\n"
        text = re.sub(
            f"(?<={re.escape(begin)}).*?(?={re.escape(end)})", lambda _, new=table: new, text, flags=re.DOTALL
        )
    return text


def _table(head: str, rows: Iterable[tuple[str, list[float]]]) -> str:
    lines = [
        f"| {name} | {median(map(abs, found)):.1%} | {min(found):+.1%} | {max(found):+.1%} |".replace("%", " %")
        for name, found in rows
    ]
    return "\n".join([f"| {head} | Median error | Lowest | Highest |", "|---" * 4 + "|", *lines]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
