"""The allocation compiler: one string defines the engines, their parallel sizes and their GPUs.

>>> import allocation
>>> plan = allocation.compile("sglang:d2+megatron:(attn:d1t2|ffn:e2)")
>>> plan.n_gpus
4
"""

from allocation.compiler import Result, RoleSettings, check, compile
from allocation.diagnostics import AllocationError, Finding, Severity, Source, Span, render
from allocation.grid import RankGrid
from allocation.language.reading import parse
from allocation.language.spelling import normalise, spell
from allocation.language.syntax import Allocation
from allocation.model_spec import ModelError, ModelSpec, load_model
from allocation.plan import Cluster, Device, EnginePlan, ParallelSizes, Plan, ServerPlan
from allocation.registry import RULES
from allocation.settings import BatchSpec, MegatronSettings, MemorySettings


def format(text: str, *, shell: bool = False) -> str:
    """Return the allocation in its canonical spelling, or in the spelling that needs the fewest quotes in a shell.

    Raises `AllocationError` when `text` does not parse.
    """
    return spell(normalise(parse(text)), shell=shell)


__all__ = [
    "RULES",
    "Allocation",
    "AllocationError",
    "BatchSpec",
    "Cluster",
    "Device",
    "EnginePlan",
    "Finding",
    "MegatronSettings",
    "MemorySettings",
    "ModelError",
    "ModelSpec",
    "ParallelSizes",
    "Plan",
    "RankGrid",
    "Result",
    "RoleSettings",
    "ServerPlan",
    "Severity",
    "Source",
    "Span",
    "check",
    "compile",
    "format",
    "load_model",
    "parse",
    "render",
]
