"""Plans for notebooks: the tables as HTML, and the picture."""

from collections.abc import Iterable, Sequence
from html import escape

from allocation.plan import EnginePlan, Plan
from allocation.views.facts import CARRIES, MOST_RANKS, links, sizes
from allocation.views.svg import engine_svg
from allocation.views.words import engine_words, plan_words


def plan_html(plan: Plan) -> str:
    """Return the HTML of a whole plan, without tables and pictures if it is too large to list every rank."""
    head = f"<p><code>{escape(plan.allocation)}</code><br>{escape(plan_words(plan))}</p>"
    return f"<div>{head}{''.join(map(engine_html, plan.engines))}</div>"


def engine_html(engine: EnginePlan) -> str:
    """Return the HTML of one engine: its summary, sizes, grids, and the links that its groups use."""
    head = f"<p><b>{escape(engine_words(engine))}</b></p>"
    numbers = _table(("dimension", "", "size", ""), ((s.name, s.short, f"{s.value:,}", s.note) for s in sizes(engine)))
    if engine.world_size > MOST_RANKS:
        return head + numbers
    rows = ((row.name, f"{row.groups:,}", f"{row.size:,}", row.words, CARRIES[row.name]) for row in links(engine))
    used = _table(("group", "groups", "ranks", "links", "carries"), rows)
    return f"{head}{numbers}{engine_svg(engine)}<details><summary>Groups and links</summary>{used}</details>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def row(cells: Sequence[str], kind: str) -> str:
        return "<tr>" + "".join(f'<{kind} style="text-align:left">{escape(cell)}</{kind}>' for cell in cells) + "</tr>"

    return f"<table>{row(head, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>"
