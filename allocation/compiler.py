"""`check` and `compile`: from text to a plan, with every finding on the way.

text -> reading -> tree -> resolve -> engines -> placement -> plan
             the rules judge each step
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from allocation.backends import ROLE_ORDER, SERVER, TRAINER
from allocation.diagnostics import AllocationError, Finding, Source, has_errors
from allocation.gpus import Gpus
from allocation.grid import DEFAULT_ORDER
from allocation.language.reading import read
from allocation.language.spelling import spell
from allocation.language.syntax import Allocation, Dim, Group, Layout, Member, Word
from allocation.model_spec import ModelError, ModelSpec, load_model
from allocation.nearest import with_remedies
from allocation.placement import DEFAULT_GPUS_PER_NODE, PlacementRequest, Planned, fill_stars, place
from allocation.plan import Cluster, EnginePlan, ParallelSizes, Plan
from allocation.registry import RULES, register_all, run_rules
from allocation.resolve import Engine, resolve
from allocation.settings import BatchSpec, MegatronSettings, MemorySettings, Workload

Spec = str | Mapping[str, str]

register_all()


@dataclass(frozen=True, slots=True)
class Result:
    """All findings, and the plan when none of them is an error."""

    findings: tuple[Finding, ...]
    plan: Plan | None

    @property
    def ok(self) -> bool:
        """Whether there is a plan."""
        return self.plan is not None


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """Settings of one role that override those shared by all roles."""

    model: ModelSpec | None
    batch: BatchSpec | None
    megatron: MegatronSettings
    memory: MemorySettings | None = None  # of the same GPUs; None: as for all others


@dataclass(frozen=True, slots=True)
class Context:
    """Everything known besides the string. Rules about the model are skipped if `model` is None; likewise `batch`."""

    cluster: Cluster | None = None
    model: ModelSpec | None = None
    batch: BatchSpec | None = None
    megatron: MegatronSettings = field(default_factory=MegatronSettings)
    order: str = DEFAULT_ORDER
    own: Mapping[str, RoleSettings] = field(default_factory=dict)
    colocated: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    memory: MemorySettings | None = None


def check(
    spec: Spec,
    *,
    cluster: Cluster | None = None,
    model: ModelSpec | str | None = None,
    batch: BatchSpec | None = None,
    megatron: MegatronSettings | None = None,
    order: str = DEFAULT_ORDER,
    memory: MemorySettings | None = None,
    key: str | None = None,
    own: Mapping[str, RoleSettings] | None = None,
    colocated: Mapping[str, str] | None = None,
    shared: Mapping[str, str] | None = None,
) -> Result:
    """Check an allocation against everything that is known, and plan it if it has no errors.

    `spec` is a whole allocation, or one member per role (`{"actor": "megatron:d4", "rollout": "sglang:d4"}`), whose
    findings carry the key `actor.backend`. `key` is the config key of a whole allocation. `model` is a spec, a path or
    a name; `order` is Megatron's rank order; `memory` has the memory size of a GPU, without which every layout fits.
    `own` has settings that replace the shared ones for a role, `colocated` the role whose GPUs a role of a mapping
    shares, `shared` the role whose ranks a role without a layout uses; memory counts both. Every error in the strings
    becomes a finding. Raises `TypeError` for a spec that is neither a string nor a mapping of strings.
    """
    if not isinstance(spec, str) and not (isinstance(spec, Mapping) and all(isinstance(v, str) for v in spec.values())):
        raise TypeError(f"an allocation is a string or a string per role, not {spec!r}")
    roles = (own or {}, colocated or {}, shared or {})
    context = Context(cluster, None, batch, megatron or MegatronSettings(), order, *roles, memory)
    try:
        context = replace(context, model=load_model(model) if isinstance(model, str) else model)
    except ModelError as error:
        unreadable = run_rules(Source(str(model), "model"), model_error=error)
        return Result((*unreadable, *judge(spec, context, key).findings), None)
    result = judge(spec, context, key)
    if result.plan is not None:
        return result
    return Result(with_remedies(spec, key, result.findings, lambda other: judge(other, context, key).findings), None)


def compile(
    spec: Spec,
    *,
    cluster: Cluster | None = None,
    model: ModelSpec | str | None = None,
    batch: BatchSpec | None = None,
    megatron: MegatronSettings | None = None,
    order: str = DEFAULT_ORDER,
    memory: MemorySettings | None = None,
    key: str | None = None,
) -> Plan:
    """Return the plan of an allocation; it takes the arguments of `check`.

    Raises `AllocationError` with all findings.
    """
    result = check(
        spec, cluster=cluster, model=model, batch=batch, megatron=megatron, order=order, memory=memory, key=key
    )
    if result.plan is None:
        raise AllocationError(result.findings)
    return result.plan


def judge(spec: Spec, context: Context, key: str | None = None) -> Result:
    """Return `check` without suggestions, with the model already read."""
    request, source, findings = _request(spec, context, key)
    if not request.groups:
        return Result(tuple(findings), None)
    if context.model is not None:
        findings += run_rules(source, whole_model=context.model)
    request, star_findings = fill_stars(request, source)
    findings += star_findings
    for engine in request.engines:
        findings += _engine_findings(engine, context)
    placed: tuple[Gpus, ...] = ()
    if not has_errors(star_findings):
        placed, placement_findings = place(request, source)
        findings += placement_findings
    about_layout = [f for f in findings if "batch" not in RULES[f.code].needs]
    plan = None if has_errors(about_layout) else _plan(request, placed, context.order)
    if plan is not None and context.memory is not None:
        findings += run_rules(source, planned=_collect_planned(request, plan, context))
    return Result(tuple(findings), None if has_errors(findings) else plan)


def _of_role(context: Context, role: str) -> Context:
    """Return the context with the settings of one role."""
    if own := context.own.get(role):
        memory = own.memory or context.memory
        return replace(context, model=own.model, batch=own.batch, megatron=own.megatron, memory=memory)
    return context


def _collect_planned(request: PlacementRequest, plan: Plan, context: Context) -> list[Planned]:
    """Return the input of the memory rules: engines with a known model, and roles that share another role's layout."""
    pairs = list(zip(request.engines, plan.engines, strict=True))
    present = {engine.role for engine in request.engines}
    for role in [role for role in context.shared if role not in present]:
        target = context.shared[role]
        pairs += [(replace(it, role=role), replace(on, role=role)) for it, on in pairs if it.role == target]
    planned = []
    for engine, placed in pairs:
        own = _of_role(context, engine.role)
        if own.model is not None and own.memory is not None:
            planned.append(Planned(engine, placed, Workload(own.model, own.megatron, own.memory, own.batch)))
    return planned


def _engine_findings(engine: Engine, context: Context) -> list[Finding]:
    """Return the findings of every rule whose needs are known."""
    context = _of_role(context, engine.role)
    known: dict[str, Any] = {"engine": engine, engine.backend.kind: engine}
    wrong: list[Finding] = []
    if context.model is not None:
        known["model"] = context.model
    if engine.backend.kind == TRAINER:
        known["order"] = context.order
        if engine.backend.name == "megatron":
            known["settings"] = context.megatron
        if context.batch is not None:
            wrong = run_rules(engine.source, engine.role, given_batch=context.batch)
            known |= {} if wrong else {"batch": context.batch}
    return [*run_rules(engine.source, engine.role, **known), *wrong]


def _request(spec: Spec, context: Context, key: str | None) -> tuple[PlacementRequest, Source, list[Finding]]:
    """Read all texts. Findings about several engines refer to the source."""
    if isinstance(spec, str):
        source = Source(spec, key)
        tree, findings = read(source)
        groups = [[resolve(member, source, None) for member in group.members] for group in tree.groups]
    else:
        fields = sorted(spec.items(), key=lambda item: (*ROLE_ORDER, item[0]).index(item[0]))
        source, findings, groups = _fields(fields, context.colocated)
    engines = [engine for group in groups for engine in group]
    for engine in engines:
        findings += run_rules(engine.source, member=engine)
    if isinstance(spec, str):
        findings += run_rules(source, engines=engines)
    return PlacementRequest(tuple(map(tuple, groups)), context.cluster), source, findings


def _fields(
    fields: list[tuple[str, str]], colocated: Mapping[str, str]
) -> tuple[Source, list[Finding], list[list[Engine]]]:
    """Read one member per config field; members of `colocated`, or with equal explicit GPU ids, share their GPUs."""
    findings: list[Finding] = []
    groups: list[list[Engine]] = []
    for role, text in fields:
        source = Source(text, f"{role}.backend")
        tree, found = read(source)
        findings += found or run_rules(source, field=tree, role=role)
        for member in list(tree.members)[:1]:
            engine = resolve(member, source, role)
            same = [
                group
                for group in groups
                if any(other.role == colocated.get(role) for other in group)
                or (member.gpus and group[0].node.gpus == member.gpus)
            ]
            if same:
                same[0].append(engine)
            else:
                groups.append([engine])
    if len(fields) == 1:
        return source, findings, groups
    text = " + ".join(text for _, text in fields)
    return Source(text, " + ".join(f"{role}.backend" for role, _ in fields)), findings, groups


def _plan(request: PlacementRequest, placed: tuple[Gpus, ...], order: str) -> Plan:
    engines = list(request.engines)
    cluster = request.cluster
    if cluster is None:
        top = max(gpus.stop for ids in placed for gpus in ids)
        cluster = Cluster(math.ceil(top / DEFAULT_GPUS_PER_NODE), DEFAULT_GPUS_PER_NODE)
    plans = tuple(_engine_plan(e, gpus, cluster, order) for e, gpus in zip(engines, placed, strict=True))
    tree = Allocation(tuple(Group(tuple(map(_compiled_member, group))) for group in request.groups))
    roles = tuple(tuple(engine.role for engine in group) for group in request.groups)
    return Plan(spell(tree), cluster, plans, roles, order)


def _compiled_member(engine: Engine) -> Member:
    """Return the member with `d*` filled in and, where it came from a config field, its role as name."""
    node = engine.node
    name = node.name or (Word(engine.role) if engine.source.key and engine.source.key.endswith(".backend") else None)
    attn = tuple(Dim("d", str(engine.dp)) if dim.count == "*" else dim for dim in node.layout.attn)
    return Member(node.backend, Layout(attn, node.layout.ffn), name, node.gpus)


def _engine_plan(engine: Engine, gpus: Gpus, cluster: Cluster, order: str) -> EnginePlan:
    trainer = engine.backend.kind != SERVER
    edp = engine.edp if trainer and engine.backend.folds else 1
    sizes = ParallelSizes(engine.tp, engine.pp, engine.cp, engine.dp, engine.ep, engine.etp, edp, engine.vpp)
    text = spell(replace(_compiled_member(engine), gpus=()))
    return EnginePlan(
        engine.role, engine.backend.name, engine.backend.kind, text, sizes, gpus, cluster.n_gpus_per_node, order
    )
