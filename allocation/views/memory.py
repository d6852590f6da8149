"""The memory of every engine and phase as bars: for a terminal, as SVG, and for notebooks."""

from collections.abc import Sequence
from html import escape

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from allocation.hardware import GIB
from allocation.memory.items import Estimate, Footprint, Phase
from allocation.views.colours import colour
from allocation.views.svg import MARGIN, Drawing
from allocation.views.terminal import plain_table

BAR = 36
SVG_BAR, SVG_ROW, SVG_LABEL = 520, 22, 150
_ITEMS = (
    "weights", "gradients", "main weights", "Adam's moments", "activations", "recomputed layers", "logits",
    "KV cache",
)  # fmt: skip


def terminal(estimate: Estimate) -> Group:
    """Return every phase as a bar on the scale of the GPU, and the items of the phase with the highest peak."""
    parts: list[RenderableType] = [Text(estimate.title, "bold")]
    for one in estimate.footprints:
        parts += [Text(), Text(_words(one, estimate), "bold"), _bars(one, estimate), _items(one.peak)]
    return Group(*parts, *(_host(node, items) for node, items in estimate.host.items()))


def _host(node: int, items: Sequence[tuple[str, int]]) -> Text:
    """Return the uses of a node's memory in a line."""
    uses = ", ".join(f"{name} {size / GIB:.1f}" for name, size in sorted(items, key=lambda item: -item[1]))
    return Text(f"\nhost memory of node {node}: {sum(size for _, size in items) / GIB:.1f} GiB ({uses})")


def _scale(estimate: Estimate) -> int:
    return max(estimate.gpu_bytes or 0, *(one.peak.bytes for one in estimate.footprints))


def _words(one: Footprint, estimate: Estimate) -> str:
    room = f" of {estimate.gpu_bytes / GIB:.1f}" if estimate.gpu_bytes else ""
    stage = f" (pipeline stage {one.stage})" if one.stage else ""
    words = f"{one.role}{stage}: {one.peak.bytes / GIB:.1f}{room} GiB in {one.peak.name}"
    if one.kv_tokens is not None:
        words += f"; KV cache for {one.kv_tokens:,} tokens of {one.kv_token_bytes:,} bytes"
    return words


def _bars(one: Footprint, estimate: Estimate) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    for phase in one.phases:
        bar, used = Text(), 0.0
        for item in phase.items:
            used += item.bytes / _scale(estimate) * BAR
            bar.append("█" * (round(used) - len(bar)), _colour(item.name))
        bar.append("·" * (BAR - len(bar)), "dim")
        table.add_row(f"  {phase.name}", bar, f"{phase.bytes / GIB:.2f} GiB")
    return table


def _items(phase: Phase) -> Table:
    table = plain_table(f"  {phase.name}", "GiB", "share", right=["GiB", "share"])
    for item in sorted(phase.items, key=lambda item: -item.bytes):
        name = Text.assemble("  ", ("█ ", _colour(item.name)), item.name)
        table.add_row(name, f"{item.bytes / GIB:.2f}", f"{item.bytes / phase.bytes:.0%}")
    return table


def _colour(name: str) -> str:
    return next((colour(i) for i, start in enumerate(_ITEMS) if name.startswith(start)), "#8c959f")


def svg(estimate: Estimate) -> str:
    """Return the bars of all engines, with a line where the GPU ends."""
    picture, scale = Drawing(), _scale(estimate)
    y = float(MARGIN)
    for one in estimate.footprints:
        y += SVG_ROW
        picture.text(MARGIN, y, _words(one, estimate), "engine")
        y += 8
        for phase in one.phases:
            x = float(MARGIN + SVG_LABEL)
            picture.text(MARGIN, y + 14, phase.name, "title")
            for item in phase.items:
                width = item.bytes / scale * SVG_BAR
                hint = f"{item.name}: {item.bytes / GIB:.2f} GiB"
                picture.box(x, y, width, SVG_ROW - 4, _colour(item.name), "white", hint)
                x += width
            picture.text(MARGIN + SVG_LABEL + SVG_BAR + 8, y + 14, f"{phase.bytes / GIB:.2f} GiB", "node")
            if estimate.gpu_bytes:
                end = MARGIN + SVG_LABEL + estimate.gpu_bytes / scale * SVG_BAR
                picture.box(end, y, 1, SVG_ROW - 4, "#c62828", "#c62828", "end of the GPU's memory")
            y += SVG_ROW
    names = dict.fromkeys(item.name for one in estimate.footprints for phase in one.phases for item in phase.items)
    for number, name in enumerate(names):
        column, row = number % 4, number // 4
        picture.box(MARGIN + column * 190, y + 10 + row * 18, 12, 12, _colour(name), "#8c959f")
        picture.text(MARGIN + column * 190 + 18, y + 20 + row * 18, name, "node")
    picture.text(MARGIN + SVG_LABEL + SVG_BAR + 90, y, "", "node")
    return picture.svg()


def html(estimate: Estimate) -> str:
    """Return the picture, for notebooks."""
    return f"<div><p><code>{escape(estimate.title)}</code></p>{svg(estimate)}</div>"
