"""What is known of a run before it starts, for tests of single rows of the exclusion table."""

from __future__ import annotations

from typing import Any

from allocation.diagnostics import Finding
from areal_like.capability import Known, capabilities
from areal_like.core.config.schema import RunConfig
from areal_like.exclusions import find_excluded
from areal_like.preflight.exclusions import RUN


def known(config: RunConfig, device: Any, model: Any = None, plan: Any = None) -> Known:
    """Return the facts about a run without data or an algorithm."""
    models = {"actor": model}
    return Known(
        config=config, device=device, plan=plan, models=models, tokenizer=None, algorithms={}, prompts={}, steps=1
    )


def excluded(config: RunConfig, device: Any, model: Any = None, plan: Any = None) -> list[Finding]:
    """Return the findings of the exclusion table."""
    rows = (*RUN, *(row for each in capabilities() for row in each.excludes))
    return list(find_excluded(rows, known(config, device, model, plan)))
