"""The findings of capabilities about a configuration alone."""

from __future__ import annotations

from allocation.diagnostics import Finding
from areal_like.capability import Known, check_capabilities
from areal_like.config.schema import RunConfig


def found_in(config: RunConfig, *, dry_run: bool = False) -> list[Finding]:
    """Return what capabilities find without a plan, models and prompts."""
    known = Known(
        config=config,
        device="cpu",
        plan=None,
        models={"actor": None},
        tokenizer=None,
        algorithms={"": None},
        prompts={"": ()},
        steps=1,
        dry_run=dry_run,
    )
    return check_capabilities(known)
