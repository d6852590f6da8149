"""Plans made visible: tables for a terminal, SVG of the grids, HTML for notebooks.

Importing this package registers the notebook views; the modules that draw are imported when a notebook shows a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from allocation.notebook import VIEWS

if TYPE_CHECKING:
    from allocation.memory.items import Estimate
    from allocation.plan import EnginePlan, Plan


def _draw_plan(plan: Plan) -> str:
    from allocation.views.html import plan_html

    return plan_html(plan)


def _draw_engine(engine: EnginePlan) -> str:
    from allocation.views.html import engine_html

    return engine_html(engine)


def _draw_estimate(estimate: Estimate) -> str:
    from allocation.views.memory import html

    return html(estimate)


VIEWS.update(Plan=_draw_plan, EnginePlan=_draw_engine, Estimate=_draw_estimate)
