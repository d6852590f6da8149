"""HTML views of plans and estimates for notebooks: the function that draws each class, imported when one is shown."""

from importlib import import_module

VIEWS = {"Plan": ("html", "plan_html"), "EnginePlan": ("html", "engine_html"), "Estimate": ("memory", "html")}


def render_html(value: object) -> str:
    """Return the HTML that a notebook shows for a plan, an engine or an estimate."""
    module, function = VIEWS[type(value).__name__]
    drawn: str = getattr(import_module(f"allocation.views.{module}"), function)(value)
    return drawn
