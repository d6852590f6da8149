"""An engine and its groups for a terminal, with rich; readable without colour and in 80 columns."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from allocation.backends import SERVER
from allocation.diagnostics import Finding, Severity, render
from allocation.plan import Device, EnginePlan, Plan
from allocation.views.colours import colour
from allocation.views.facts import CARRIES, RankMap, groups_of, links, plan_maps, rank_groups, sizes
from allocation.views.words import count, engine_words, plan_words, ranges

STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}
WIDTH = 78
MOST_NODES = 8
MOST_GROUPS = 64


def explain(plan: Plan, by: str | None = None, width: int = WIDTH) -> Group:
    """Return the whole plan in at most `width` columns: each engine, its place, and the links of its groups.

    Raises `KeyError` for `by`.
    """
    parts: list[RenderableType] = [Text(plan.allocation, "bold"), Text(plan_words(plan))]
    for engine, maps in plan_maps(plan, by):
        dimensions = plain_table("dimension", "", "size", "", right=["size"])
        for row in sizes(engine):
            dimensions.add_row(row.name, row.short, f"{row.value:,}", row.note)
        parts += [Text(), Text(engine_words(engine), "bold"), _indent(dimensions)]
        for rank_map in maps:
            parts += [Text(), Text(f"{rank_map.title}: rank and position, one colour per {rank_map.by} group")]
            parts += _map(engine, rank_map, min(width, WIDTH))
        parts += [Text(), _links(engine)]
    return Group(*parts)


def plain_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """Return a table without lines; numbers are right-aligned."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _indent(table: Table) -> Padding:
    return Padding(table, (0, 0, 0, 2))


def _map(engine: EnginePlan, rank_map: RankMap, line: int) -> list[RenderableType]:
    """Return one row per node, GPUs from left to right; a node that is too wide for the line takes several rows."""
    rank_of = {device: rank for rank, device in enumerate(engine.devices)}
    nodes = sorted({device.node for device in engine.devices})
    width = max(*map(len, rank_map.labels), len(str(len(rank_of))))
    room = line - 2 - len(f"node {nodes[-1]} ")
    width = next((wide for wide in (width + 2, width + 1) if (wide + 1) * engine.n_gpus_per_node <= room), width)
    lines = -(-engine.n_gpus_per_node // max(1, room // (width + 1)))
    per_line = -(-engine.n_gpus_per_node // lines)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=False)
    for node in nodes[:MOST_NODES]:
        for start in range(0, engine.n_gpus_per_node, per_line):
            gpus = range(start, min(start + per_line, engine.n_gpus_per_node))
            ranks = [rank_of.get(Device(node, gpu)) for gpu in gpus]
            table.add_row("" if start else f"node {node}", *(_cell(rank_map, rank, width) for rank in ranks))
    more = [Text(f"  … and {count(len(nodes) - MOST_NODES, 'more node')}")] if len(nodes) > MOST_NODES else []
    return [_indent(table), *more]


def _cell(rank_map: RankMap, rank: int | None, width: int) -> Text:
    if rank is None:
        return Text("·".center(width), "dim")
    group = rank_map.groups[rank]
    style = f"black on {colour(group)}" if group >= 0 else ""
    lines = (str(rank), rank_map.labels[rank]) if rank_map.labels[rank] else (str(rank),)
    return Text("\n".join(line.center(width) for line in lines), style)


def _links(engine: EnginePlan) -> RenderableType:
    rows = links(engine)
    if not rows:
        return Text("  Every group has one rank, so no data is exchanged.")
    table = plain_table("group", "groups", "ranks", "links", "carries", right=["groups", "ranks"])
    for row in rows:
        style = "yellow" if row.across else ""
        table.add_row(row.name, f"{row.groups:,}", f"{row.size:,}", Text(row.words, style), CARRIES[row.name])
    return _indent(table)


def partners(engine: EnginePlan, rank: int, name: str | None = None) -> Group:
    """Return the position of one rank, and every group with several ranks (or only `name`) that contains it."""
    here = engine.devices[rank]
    position = "" if engine.kind == SERVER else "".join(f", {k} {v}" for k, v in engine.coordinates(rank).items())
    title = Text(f"{engine.role} rank {rank}: node {here.node}, GPU {here.gpu}{position}", "bold")
    table = plain_table("group", "ranks", "links", "carries")
    for key, members in groups_of(engine, rank).items():
        if name not in (None, key):
            continue
        nodes = len({engine.devices[member].node for member in members})
        words = "same node" if nodes == 1 else f"{nodes} nodes"
        table.add_row(key, ranges(members), Text(words, "yellow" if nodes > 1 else ""), CARRIES[key])
    return Group(title, _indent(table) if table.row_count else Text("  This rank exchanges no data with other ranks."))


def groups_list(engine: EnginePlan, name: str | None = None) -> Group:
    """Return all groups, or those called `name`, rank by rank."""
    lines = []
    for key, groups in rank_groups(engine).items():
        if name in (None, key):
            title = f"{engine.role} {key}: {count(len(groups), 'group')} of {count(groups.shape[1], 'rank')}"
            lines.append(Text(title, "bold"))
            lines += [Text(f"  {number}: {ranges(row)}") for number, row in enumerate(groups[:MOST_GROUPS].tolist())]
            if len(groups) > MOST_GROUPS:
                lines.append(Text(f"  … and {len(groups) - MOST_GROUPS:,} more; --json has all"))
    return Group(*lines)


def verdict(label: str, plan: Plan | None) -> Text:
    """Return one line on whether the allocation is valid."""
    if plan is None:
        return Text.assemble(("invalid: ", "bold red"), label)
    return Text.assemble(("valid: ", "bold green"), f"{label}, {count(plan.n_gpus, 'GPU')}")


def finding_text(finding: Finding) -> Text:
    """Return the finding with its severity in colour; control characters become blanks."""
    text = Text("".join(c if c.isprintable() or c == "\n" else " " for c in render(finding)))
    text.stylize(STYLES[finding.severity], 0, len(finding.severity))
    return text
