"""Checks the layout of a scoring model on servers of the run against that model."""

from collections.abc import Iterator
from dataclasses import replace

from allocation.compiler import check
from allocation.diagnostics import Finding, Severity, Source
from allocation.model_spec import ModelSpec
from allocation.plan import Plan
from areal_like.config.schema import SCORERS, RunConfig


def check_served_layout(
    config: RunConfig, role: str, backend: str | None, spec: ModelSpec, plan: Plan | None
) -> Iterator[Finding]:
    """Check that a role's layout can hold its model; a layout that is wrong for any model is found elsewhere."""
    key = "allocation_mode" if config.allocation_mode else f"{SCORERS[role]}.backend"
    placed = [engine.text for engine in plan.engines if engine.role == role] if plan else []
    layout = backend or next((text.replace(f"[{role}]", "") for text in placed), None)
    if layout is None:
        return
    known = {found.code for found in check({role: layout}).findings}
    for found in check({role: layout}, model=spec).findings:
        if found.severity == Severity.ERROR and found.code not in known | {"ALLOC-UNTRAINED", "ALLOC-QUANTIZED"}:
            yield replace(found, source=Source("", key), spans=())
