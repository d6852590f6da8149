"""Write the table of measured presets in docs/algorithms.md from benchmarks/results/presets_cpu.json."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE, RESULTS = ROOT / "docs/algorithms.md", ROOT / "benchmarks/results/presets_cpu.json"
BEGIN, END = "<!-- by `python docs/generate/presets.py` -->\n", "<!-- end -->\n"
SHARED = ("actor.eps_clip=null", "actor.eps_clip_higher=null", "actor.use_decoupled_loss=null")  # of all runs


def table() -> str:
    """A row for each preset of the file, the fastest learner first."""
    presets = json.loads(RESULTS.read_text())["presets"]
    rows = sorted(presets.items(), key=lambda preset: (preset[1]["samples_to_target"] or float("inf"), preset[0]))
    head = "| `algorithm` | samples to held-out reward 0.9 | seconds | processor seconds | reward at the end | with |"
    return "\n".join([head, "|---" * 6 + "|", *(_row(name, figures) for name, figures in rows)]) + "\n"


def page() -> str:
    """The page with the table of today."""
    return re.sub(
        f"(?<={re.escape(BEGIN)}).*?(?={re.escape(END)})", lambda _: table(), PAGE.read_text(), flags=re.DOTALL
    )


def _row(name: str, figures: dict[str, Any]) -> str:
    samples, seconds = figures["samples_to_target"], figures["seconds_to_target"]
    cpu_s = figures.get("cpu_seconds_to_target")
    own = [setting for setting in figures["settings"] if setting not in SHARED and not setting.startswith("algorithm=")]
    cells = (
        f"`{name}`",
        f"{samples:,}" if samples else "not reached",
        f"{seconds:.0f}" if seconds else "",
        f"{cpu_s:.0f}" if cpu_s else "not measured" if samples else "",
        f"{figures['final_reward']:.3f}",
        ", ".join(f"`{setting}`" for setting in own),
    )
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page())
