"""Differences between a plan and its written settings: the settings are read back, and every difference is a
finding."""

from dataclasses import asdict, replace

import allocation.convert.rules as _rules  # noqa: F401  (registers the rules)
from allocation.compiler import Context, judge
from allocation.convert.drafts import pool
from allocation.convert.system import System
from allocation.diagnostics import Finding, Source, Span, has_errors
from allocation.gpus import merge, union
from allocation.plan import EnginePlan, Plan
from allocation.registry import run_rules

SIZES = {
    "tp": "tensor parallelism",
    "pp": "pipeline parallelism",
    "cp": "context parallelism",
    "dp": "data parallelism",
    "ep": "expert parallelism",
    "etp": "expert tensor parallelism",
    "vpp": "virtual pipeline stages",
}


def findings(system: System, plan: Plan, text: str) -> list[Finding]:
    """Return every difference between `plan` and the plan that `system.read` makes of `text`."""
    back_text, problems = system.read(text)
    result = judge(back_text, Context(plan.cluster)) if back_text and not has_errors(problems) else None
    found: list[Finding] = []

    def report(engine: EnginePlan | None, **known: object) -> None:
        start = plan.allocation.find(engine.text) if engine else -1
        spans = (Span(start, start + len(engine.text)),) if engine and start >= 0 else ()
        for finding in run_rules(Source(plan.allocation), system=system, **known):
            found.append(replace(finding, spans=spans, help=finding.help or system.limits.get(finding.code)))

    if result is None or result.plan is None:
        report(None, plan=plan, problems=(*problems, *(result.findings if result else ())))
        return found
    theirs = {engine.role: engine for engine in result.plan.engines}
    kept = [(engine, theirs[engine.role]) for engine in plan.engines if engine.role in theirs]
    for engine in plan.engines:
        if engine.role not in theirs:
            report(engine, lost=engine)
    for engine, other in kept:
        if engine.backend != other.backend:
            report(engine, moved=engine, theirs=other)
        mine, others = asdict(engine.sizes), asdict(other.sizes)
        differences = [(SIZES[name], mine[name], others[name]) for name in SIZES if mine[name] != others[name]]
        if differences:
            report(engine, resized=engine, differences=differences)
    ours, others_ = [pair[0] for pair in kept], [pair[1] for pair in kept]
    named = "@" in plan.allocation and [merge(e.gpus) for e in ours] != [merge(e.gpus) for e in others_]
    if kept and (named or not _even(system, ours) or _places(ours) != _places(others_)):
        report(None, scattered=plan)
    if plan.order not in system.orders and any(engine.kind == "trainer" for engine in ours):
        report(None, reordered=plan)
    return found


def _even(system: System, engines: list[EnginePlan]) -> bool:
    """Return whether the nodes contribute equally many GPUs, where the system requires it."""
    together = {"none": [], "each": [[engine] for engine in engines], "all": [engines]}[system.even]
    return all(pool(union(e.gpus for e in part), engines[0].n_gpus_per_node).even for part in together)


def _places(engines: list[EnginePlan]) -> list[list[tuple[int, int, int]]]:
    """Return the relative positions of engines: start, end and number of nodes of every range of ids."""
    low = min(union(e.gpus for e in engines)[0].start, *(engine.gpus[0].start for engine in engines))
    per = engines[0].n_gpus_per_node
    return [
        [(run.start - low, run.stop - low, (run.stop - 1) // per - run.start // per) for run in merge(engine.gpus)]
        for engine in engines
    ]
