"""Checks whether servers of the run can hold their model, and whether SGLang serves it on the device."""

from collections.abc import Iterator
from dataclasses import replace

from allocation.compiler import check
from allocation.diagnostics import Finding, Severity, Source
from allocation.model_spec import ModelSpec
from allocation.plan import Plan
from areal_like.config.findings import finding
from areal_like.config.schema import SCORERS, RunConfig
from areal_like.preflight.machine import device_of
from areal_like.rollout.sglang.architectures import ON_GPUS_ALONE
from areal_like.types import Device


def check_served_layout(
    config: RunConfig, role: str, backend: str | None, spec: ModelSpec, plan: Plan | None
) -> Iterator[Finding]:
    """Check that a role's layout can hold its model; a layout that is wrong for any model is found elsewhere."""
    yield from check_served_family(device_of(config.device), spec, f"{SCORERS[role]}.path")
    key = "allocation_mode" if config.allocation_mode else f"{SCORERS[role]}.backend"
    placed = [engine.text for engine in plan.engines if engine.role == role] if plan else []
    layout = backend or next((text.replace(f"[{role}]", "") for text in placed), None)
    if layout is None:
        return
    known = {found.code for found in check({role: layout}).findings}
    for found in check({role: layout}, model=spec).findings:
        if found.severity == Severity.ERROR and found.code not in known | {"ALLOC-UNTRAINED", "ALLOC-QUANTIZED"}:
            yield replace(found, source=Source("", key), spans=())


def check_served_family(device: Device, spec: ModelSpec, key: str) -> Iterator[Finding]:
    """Check that SGLang serves the family on the device."""
    if device == "cpu" and spec.family in ON_GPUS_ALONE:
        message = f"SGLang serves a {spec.family} on GPUs only: its CPU server lacks kernels of this family"
        yield finding("RUN-CPU", key, message, "set device=cuda, or use a model of another family, such as a qwen3")
