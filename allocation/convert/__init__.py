"""Allocations in other systems' words, both ways.

>>> from allocation.convert import read
>>> read("areal", "sglang.d4p1t1+d2p2t1")[0]
'sglang:d4+megatron:d2p2'

`read` lists settings that an allocation cannot hold. `write` reads back its own result and reports every
difference, so nothing is lost in silence.
"""

from allocation.convert import areal, loss, megatron, roll, sglang, trinity, verl
from allocation.diagnostics import Finding, Source, has_errors
from allocation.plan import Plan
from allocation.registry import run_rules

_FIRST = (megatron.SYSTEM, sglang.SYSTEM, areal.SYSTEM, areal.LEGACY)
_SYSTEMS = {s.name: s for s in (*_FIRST, verl.SYSTEM, roll.SYSTEM, verl.SIIRL, trinity.SYSTEM)}
SYSTEMS: tuple[str, ...] = tuple(_SYSTEMS)


def read(system: str, text: str) -> tuple[str, list[Finding]]:
    """Return the allocation that `text`, settings of `system`, describes, and findings about errors and losses.

    The string is empty if a finding is an error. It is checked only as far as reading needs; `allocation.check` does
    the rest. Raises `KeyError` for a system that is not in `SYSTEMS`.
    """
    allocation, findings = _SYSTEMS[system].read(text)
    return ("" if has_errors(findings) else allocation), findings


def write(system: str, plan: Plan) -> tuple[str, list[Finding]]:
    """Return settings of `system` for `plan`, and a finding for everything that they cannot express.

    The text is empty if no part of the plan has an equivalent. Raises `KeyError` for a system that is not in `SYSTEMS`.
    """
    target = _SYSTEMS[system]
    text = target.write(plan)
    if not text:
        return "", run_rules(Source(plan.allocation), system=target, plan=plan, problems=())
    findings = loss.findings(target, plan, text)
    return ("" if has_errors(findings) else text), findings


__all__ = ["SYSTEMS", "read", "write"]
