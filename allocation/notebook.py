"""HTML views of plans and estimates for notebooks, which `allocation/views/` registers here."""

from collections.abc import Callable
from typing import Any

VIEWS: dict[str, Callable[[Any], str]] = {}


def render_html(value: object) -> str:
    """Return the HTML that a notebook shows for a plan, an engine or an estimate."""
    return VIEWS[type(value).__name__](value)
