"""Allocations in other systems' words, both ways.

>>> from allocation.convert import read
>>> read("areal", "sglang.d4p1t1+d2p2t1")[0]
'sglang:d4+megatron:d2p2'

`read` says what in the settings an allocation cannot hold. `write` reads back what it wrote and says where the
two differ, so nothing is lost in silence.
"""

from allocation.convert import areal, loss, megatron, roll, sglang, siirl, trinity, verl
from allocation.diagnostics import Finding, Source, has_errors
from allocation.plan import Plan
from allocation.registry import run_rules

_FIRST = (megatron.SYSTEM, sglang.SYSTEM, areal.SYSTEM, areal.LEGACY)
_SYSTEMS = {s.name: s for s in (*_FIRST, verl.SYSTEM, roll.SYSTEM, siirl.SYSTEM, trinity.SYSTEM)}
SYSTEMS: tuple[str, ...] = tuple(_SYSTEMS)


def read(system: str, text: str) -> tuple[str, list[Finding]]:
    """The allocation that `text`, settings of `system`, describes, and what is wrong or lost.

    The string is empty when a finding is an error. It is not checked beyond what reading needs: `allocation.check`
    does that. Raises `KeyError` for a system that is not in `SYSTEMS`.
    """
    allocation, findings = _SYSTEMS[system].read(text)
    return ("" if has_errors(findings) else allocation), findings


def write(system: str, plan: Plan) -> tuple[str, list[Finding]]:
    """Settings of `system` for `plan`, and a finding for all that they cannot say.

    The text is empty when nothing of the plan has a place there. Raises `KeyError` for a system that is not in
    `SYSTEMS`.
    """
    target = _SYSTEMS[system]
    text = target.write(plan)
    if not text:
        return "", run_rules(Source(plan.allocation), system=target, plan=plan, problems=())
    findings = loss.findings(target, plan, text)
    return ("" if has_errors(findings) else text), findings


__all__ = ["SYSTEMS", "read", "write"]
