"""The whole exclusion table: rows on runs, on roles, and the rows of capabilities."""

from typing import Any

from areal_like.capability import capabilities
from areal_like.exclusions import Exclusion
from areal_like.preflight.exclusions import RUN
from areal_like.preflight.role_exclusions import MODEL, PREDICTION, ROLE


def exclusion_table() -> tuple[Exclusion[Any], ...]:
    """Return every row."""
    return (*RUN, *ROLE, *MODEL, *PREDICTION, *(row for each in capabilities() for row in each.excludes))
