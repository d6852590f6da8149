"""Bytes per GPU of every engine in every phase, from the shapes alone.

Sizes are given for the largest pipeline stage; experts are assumed to be equally busy. Megatron-LM's own
estimate is `training/theoretical_memory_usage.py`.
"""

from __future__ import annotations

from dataclasses import replace

from allocation.backends import BACKENDS, SERVER
from allocation.memory import fsdp, megatron
from allocation.memory.host import host_nodes, without_offload
from allocation.memory.items import Estimate, Footprint, shared_peak
from allocation.memory.servers import server
from allocation.plan import EnginePlan, ParallelSizes, Plan
from allocation.settings import Workload

__all__ = ["Estimate", "Footprint", "estimate", "footprint", "footprint_of", "footprints", "shared_peak"]


def estimate(plan: Plan, work: Workload) -> Estimate:
    """Return the memory of every engine of a plan on each of its GPUs."""
    resting = tuple(zip(plan.engines, footprints(plan, without_offload(work)), strict=True))
    return Estimate(plan.allocation, work.memory.gpu_bytes, footprints(plan, work), host_nodes(resting, work))


def footprints(plan: Plan, work: Workload) -> tuple[Footprint, ...]:
    """Return the memory of every engine of a plan."""
    return tuple(footprint(engine, work) for engine in plan.engines)


def footprint(engine: EnginePlan, work: Workload) -> Footprint:
    """Return the memory of one engine."""
    return footprint_of(engine.role, engine.backend, engine.sizes, work)


def footprint_of(role: str, backend: str, sizes: ParallelSizes, work: Workload) -> Footprint:
    """Return the memory of an engine that is not yet placed."""
    if BACKENDS[backend].kind == SERVER:
        return server(role, sizes, work)
    if role != "actor":  # no other role has adapters, or trains a layer for multi-token prediction
        work = replace(work, memory=replace(work.memory, trained=1.0, mtp_trained=False))
    return fsdp.trainer(role, sizes, work) if backend == "fsdp" else megatron.trainer(role, sizes, work)
