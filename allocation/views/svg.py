"""The grids of a plan as one SVG picture: a box per node, a cell per GPU, a colour per group."""

from collections.abc import Iterable
from html import escape

from allocation.plan import Device, EnginePlan, Plan
from allocation.views.colours import colour
from allocation.views.facts import RankMap, plan_maps, rank_maps
from allocation.views.words import count, ranges

CELL_WIDTH, CELL_HEIGHT, GAP = 52, 38, 4
PADDING, NODE_TITLE, LINE = 8, 18, 20
MARGIN = 16
PER_LINE = 8
MOST_NODES = 64
LEGEND_GROUPS = 8
# Attributes and no style sheet: a style sheet inside a notebook would reach the whole page.
KINDS = {
    "engine": 'font-size="15" font-weight="600"',
    "title": 'font-size="13"',
    "node": 'font-size="11" fill="#57606a"',
    "rank": 'font-size="13" font-weight="600" text-anchor="middle"',
    "place": 'font-size="10" text-anchor="middle"',
}


class Drawing:
    """Shapes so far, and the size that holds them all."""

    def __init__(self) -> None:
        self.shapes: list[str] = []
        self.width = self.height = 0.0

    def box(self, x: float, y: float, width: float, height: float, fill: str, line: str, hint: str = "") -> None:
        title = f"<title>{escape(hint)}</title>" if hint else ""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="{line}">'
            f"{title}</rect>"
        )
        self._hold(x + width, y + height)

    def text(self, x: float, y: float, words: str, kind: str) -> None:
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" {KINDS[kind]}>{escape(words)}</text>')
        self._hold(x + (0 if kind in ("rank", "place") else 7.5 * len(words)), y)

    def _hold(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, x), max(self.height, y)

    def svg(self) -> str:
        width, height = self.width + MARGIN, self.height + MARGIN
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img" font-family="system-ui, sans-serif" fill="#24292f">'
            f'<rect width="100%" height="100%" fill="white"/>{"".join(self.shapes)}</svg>\n'
        )


def plan_svg(plan: Plan, by: str | None = None) -> str:
    """Return all engines of a plan, one below the other. Raises `KeyError` as `plan_maps` does."""
    return _svg(plan_maps(plan, by))


def engine_svg(engine: EnginePlan) -> str:
    """Return the grids of one engine, side by side."""
    return _svg([(engine, rank_maps(engine))])


def _svg(engines: Iterable[tuple[EnginePlan, list[RankMap]]]) -> str:
    picture = Drawing()
    for engine, maps in engines:
        top = picture.height + MARGIN + LINE
        picture.text(MARGIN, top, f"{engine.role}: {engine.text}", "engine")
        left = float(MARGIN)
        for rank_map in maps:
            left = MARGIN + _panel(picture, engine, rank_map, left, top + LINE)
    return picture.svg()


def _panel(picture: Drawing, engine: EnginePlan, rank_map: RankMap, left: float, top: float) -> float:
    """Draw one grid with its legend; return its right edge."""
    groups = len({group for group in rank_map.groups if group >= 0})
    picture.text(left, top + 4, f"{rank_map.title}, {count(groups, f'{rank_map.by} group')}", "title")
    rank_of = {device: rank for rank, device in enumerate(engine.devices)}
    nodes = sorted({device.node for device in engine.devices})
    per_line = min(PER_LINE, engine.n_gpus_per_node)
    lines = -(-engine.n_gpus_per_node // per_line)
    width = 2 * PADDING + per_line * (CELL_WIDTH + GAP) - GAP
    height = NODE_TITLE + lines * (CELL_HEIGHT + GAP) - GAP + PADDING
    y = top + PADDING + 8
    for node in nodes[:MOST_NODES]:
        picture.box(left, y, width, height, "#f6f8fa", "#d0d7de")
        picture.text(left + PADDING, y + 13, f"node {node}", "node")
        for gpu in range(engine.n_gpus_per_node):
            line, column = divmod(gpu, per_line)
            x = left + PADDING + column * (CELL_WIDTH + GAP)
            below = y + NODE_TITLE + line * (CELL_HEIGHT + GAP)
            _cell(picture, rank_map, rank_of.get(Device(node, gpu)), x, below, gpu)
        y += height + PADDING
    if len(nodes) > MOST_NODES:
        picture.text(left, y + 10, f"… and {len(nodes) - MOST_NODES} more nodes", "node")
        y += LINE
    _legend(picture, rank_map, left, y)
    return left + width


def _cell(picture: Drawing, rank_map: RankMap, rank: int | None, x: float, y: float, gpu: int) -> None:
    if rank is None:
        picture.box(x, y, CELL_WIDTH, CELL_HEIGHT, "white", "#d0d7de", f"GPU {gpu}: not used by this engine")
        return
    group, place = rank_map.groups[rank], rank_map.labels[rank]
    fill = colour(group) if group >= 0 else "white"
    picture.box(x, y, CELL_WIDTH, CELL_HEIGHT, fill, "#8c959f", f"rank {rank}, GPU {gpu}, {rank_map.by} group {group}")
    picture.text(x + CELL_WIDTH / 2, y + 16, str(rank), "rank")
    picture.text(x + CELL_WIDTH / 2, y + 30, place, "place")


def _legend(picture: Drawing, rank_map: RankMap, left: float, y: float) -> None:
    """Draw the first groups and their colours, two per line."""
    members: dict[int, list[int]] = {}
    for rank, group in enumerate(rank_map.groups):
        if group in members or (group >= 0 and len(members) < LEGEND_GROUPS):
            members.setdefault(group, []).append(rank)
    for number, (group, ranks) in enumerate(sorted(members.items())):
        words = ranges(ranks)
        shown = words if len(words) <= 24 else f"{words[:23]}…"
        x, line = left + number % 2 * 230, y + number // 2 * LINE
        picture.box(x, line, 12, 12, colour(group), "#8c959f")
        picture.text(x + 18, line + 10, f"{rank_map.by} {group}: {shown}", "node")
