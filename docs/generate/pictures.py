"""Writes the pictures of README and `docs/concepts.md` as SVG."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import allocation
from allocation.views.svg import plan_svg

FOLDER = Path(__file__).parents[1] / "images"
STALENESS = Path(__file__).parents[2] / "benchmarks/results/staleness_cpu.json"
DEMO = Path(__file__).parents[2] / "benchmarks/results/demo_cpu.json"
CURVES = ["#57606a", "#0969da", "#1a7f37", "#bf8700", "#cf222e"]  # of η = 0, 1, 2, 4, 8
COLOURS = ["#57606a", "#0969da", "#1a7f37", "#bf8700"]  # of versions 0, 1, 2, 3
INK, SOFT, LINE = "#1f2328", "#656d76", "#d8dee4"


def picture(width: int, height: int, *parts: str) -> str:
    """On white, so that it can be read on a dark page too."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    ground = f'<rect width="{width}" height="{height}" fill="white"/>'
    return f'{head} font-family="system-ui, sans-serif" font-size="13">\n' + "\n".join((ground, *parts)) + "\n</svg>\n"


def box(x: float, y: float, width: float, colour: str, label: str = "", height: float = 24) -> str:
    """A coloured bar with white words in its middle."""
    bar = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{colour}"/>'
    return bar + text(x + width / 2, y + height / 2 + 5, label, "white", "middle") if label else bar


def text(x: float, y: float, words: str, colour: str = INK, anchor: str = "start") -> str:
    """Words."""
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def line(x: float, top: float, bottom: float) -> str:
    """A dashed moment in time."""
    return f'<line x1="{x}" x2="{x}" y1="{top}" y2="{bottom}" stroke="{SOFT}" stroke-dasharray="4 3"/>'


def staleness() -> str:
    """Trainer and server over time: responses span versions, and are trained at most η = 2 versions later."""
    updates = [130, 320, 510, 700]  # when version 0, 1, 2, 3 is on the server
    parts = [line(x, 30, 292) for x in updates[1:]]
    parts += [text(x, 24, f"version {v}", COLOURS[v], "middle") for v, x in enumerate(updates) if v]
    parts += [text(10, 57, "trainer"), text(10, 117, "responses")]
    parts += [box(updates[v] + 6, 40, 182, COLOURS[v + 1], f"step {v + 1}: {v} → {v + 1}") for v in range(3)]
    responses = [(140, 300, 2), (150, 420, 3), (330, 500, 3), (430, 690, 4), (520, 680, 4), (560, 840, None)]
    for row, (start, end, step) in enumerate(responses):
        y = 100 + row * 32
        cuts = [start, *(x for x in updates if start < x < end), end]
        for left, right in pairwise(cuts):
            version = sum(x <= left for x in updates) - 1
            parts.append(box(left, y, right - left - 1, COLOURS[version], height=18))
        oldest = sum(x <= start for x in updates) - 1
        if step is not None:  # it trains what version step - 1 is then
            parts.append(text(end + 6, y + 14, f"in step {step}: staleness {step - 1 - oldest}", SOFT))
    return picture(
        880,
        320,
        *parts,
        text(
            10,
            310,
            "η = 2: a response begins only if it is sure to be trained at most two versions after its first token",
            SOFT,
        ),
    )


def update() -> str:
    """One response across an update, with the three ways of `weight_update.requests`."""
    parts = [line(400, 34, 236), text(400, 24, "new weights", INK, "middle")]
    rows = [
        ("in_place", [(150, 245, 1), (420, 330, 2)], "the next token goes on over the old keys and values"),
        ("recompute", [(150, 245, 1), (480, 270, 2)], "keys and values are made again first"),
        ("drain", [(150, 330, 1), (500, 250, 2)], "the update waits; what starts then is another response"),
    ]
    for row, (name, spans, why) in enumerate(rows):
        y = 50 + 66 * row
        parts += [text(10, y + 17, name), text(150, y + 44, why, SOFT)]
        parts += [box(x, y, width, COLOURS[v], f"tokens of version {v}") for x, width, v in spans]
        if name == "recompute":
            parts.append(box(420, y, 58, SOFT, "prefill"))
    return picture(770, 250, *parts)


def curves(left: float, title: str, lines: Mapping[str, Sequence[tuple[int, float]]]) -> list[str]:
    """A panel of rewards over steps from `left` on; its lines differ in colour."""
    width, top, height, last = 330, 50, 200, max(step for line in lines.values() for step, _ in line)
    parts = [text(left, 30, title)]
    for reward in (0.4, 0.6, 0.8, 1.0):
        y = top + height * (1.0 - reward) / 0.7
        parts += [f'<line x1="{left}" x2="{left + width}" y1="{y:.0f}" y2="{y:.0f}" stroke="{LINE}"/>']
        parts += [text(left - 8, round(y + 4), f"{reward:.1f}", SOFT, "end")]
    ticks = sorted({round(last * quarter / 4) for quarter in range(5)})
    parts += [text(left + width * step / last, top + height + 18, str(step), SOFT, "middle") for step in ticks]
    parts += [text(left + width / 2, top + height + 36, "training step", SOFT, "middle")]
    for row, (name, line) in enumerate(lines.items()):
        colour = CURVES[row % len(CURVES)]
        points = " ".join(f"{left + width * s / last:.1f},{top + height * (1.0 - r) / 0.7:.1f}" for s, r in line)
        parts += [f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>']
        parts += [text(left + width - 100, top + height - 90 + 18 * row, name, colour)]
    return parts


def learning_curves() -> str:
    """Return the demo's evaluation reward over steps, by loss and η, and by update mode; means of the seeds."""
    panels: dict[str, dict[str, list[Sequence[tuple[int, float]]]]] = {}
    for run in json.loads(STALENESS.read_text())["runs"].values():
        bound, _, loss = run["name"].partition(", ")
        panel, name = (f"{loss} loss", bound) if loss else ("requests at an update, η = 2", bound)
        panels.setdefault(panel, {}).setdefault(name, []).append(run["held_out"])
    parts = []
    for place, (panel, lines) in enumerate(sorted(panels.items())):
        means = {
            name: [(points[0][0], fmean(reward for _, reward in points)) for points in zip(*seeds, strict=False)]
            for name, seeds in sorted(lines.items())
        }
        parts += curves(50 + 400 * place, f"{panel}: evaluation reward over steps", means)
    return picture(50 + 400 * len(panels), 300, *parts)


def overview() -> str:
    """Trainer and servers side by side over time, beside the reward curve of the demo."""
    updates = [90, 190, 290, 390]  # when versions 0 to 3 are on the servers
    parts = [text(20, 30, "Servers generate while the trainer trains")]
    parts += [line(x, 44, 232) for x in updates[1:]]
    parts += [text(20, 72, "trainer", SOFT), *(text(20, 122 + 44 * i, f"server {i}", SOFT) for i in range(3))]
    parts += [box(updates[v] + 4, 56, 92, COLOURS[v + 1], f"step {v + 1}") for v in range(3)]
    responses = [[(94, 176), (180, 330), (334, 440)], [(94, 250), (254, 380), (384, 440)], [(94, 140), (144, 440)]]
    for row, spans in enumerate(responses):
        for start, end in spans:
            cuts = [start, *(x for x in updates if start < x < end), end]
            for left, right in pairwise(cuts):
                version = sum(x <= left for x in updates) - 1
                parts.append(box(left, 106 + 44 * row, right - left - 1, COLOURS[version], height=22))
    parts += [text(x, 250, f"weights {v}", COLOURS[v], "middle") for v, x in enumerate(updates) if v]
    parts += [text(265, 286, "time →", SOFT, "middle")]
    runs = json.loads(DEMO.read_text())["runs"]
    lines = {f"seed {run['seed']}": run["scalars"]["reward/held_out"] for run in runs}
    return picture(870, 300, *parts, *curves(510, "CPU demo: evaluation reward over steps", lines))


def pictures() -> dict[str, str]:
    """Name of a file to its SVG."""
    drawn = {"learning_curves.svg": learning_curves()} if STALENESS.exists() else {}
    drawn |= {"overview.svg": overview()}
    folded = allocation.compile("megatron:(attn:d1p2t2c2|ffn:d1p2t1e4)")
    return drawn | {"staleness.svg": staleness(), "in_place.svg": update(), "folding.svg": plan_svg(folded)}


if __name__ == "__main__":
    for name, svg in pictures().items():
        (FOLDER / name).write_text(svg)
