"""`check` and `compile`: from text to a plan, with every finding on the way.

text -> reading -> tree -> resolve -> engines -> placement -> plan
             words.py, rules.py and placement.py judge
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import allocation.rules as _rules  # noqa: F401  (registers the rules)
from allocation.diagnostics import AllocationError, Finding, Problem, Source, has_errors, rule, run_rules
from allocation.grid import DEFAULT_ORDER
from allocation.model_spec import ModelError, ModelSpec, load_model
from allocation.nearest import with_nearest
from allocation.placement import DEFAULT_GPUS_PER_NODE, Gpus, Request, fill_stars, place
from allocation.plan import Cluster, EnginePlan, ParallelSizes, Plan
from allocation.reading import read
from allocation.resolve import SERVER, Engine, resolve
from allocation.settings import BatchSpec, MegatronSettings
from allocation.syntax import Allocation, Dim, Group, Layout, Member, Word

ROLE_ORDER = ("rollout", "actor", "critic", "ref")

Spec = str | Mapping[str, str]


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
class Context:
    """What is known besides the string. `model` None: rules about the model have nothing to say; likewise `batch`."""

    cluster: Cluster | None = None
    model: ModelSpec | str | None = None
    batch: BatchSpec | None = None
    megatron: MegatronSettings = field(default_factory=MegatronSettings)
    order: str = DEFAULT_ORDER


def check(
    spec: Spec,
    *,
    cluster: Cluster | None = None,
    model: ModelSpec | str | None = None,
    batch: BatchSpec | None = None,
    megatron: MegatronSettings | None = None,
    order: str = DEFAULT_ORDER,
    key: str | None = None,
) -> Result:
    """Checks an allocation against everything that is known, and plans it when nothing is wrong.

    `spec` is a whole allocation, or one member per role (`{"actor": "megatron:d4", "rollout": "sglang:d4"}`), whose
    findings carry the key `actor.backend`. `key` is the config key of a whole allocation. `model` is a spec, a path
    or a name; `order` is Megatron's rank order. Whatever is written in the strings ends up in the findings. Raises
    `TypeError` for a spec that is neither a string nor a mapping of strings.
    """
    if not isinstance(spec, str) and not (isinstance(spec, Mapping) and all(isinstance(v, str) for v in spec.values())):
        raise TypeError(f"an allocation is a string or a string per role, not {spec!r}")
    context = Context(cluster, model, batch, megatron or MegatronSettings(), order)
    if isinstance(model, str):
        try:
            context = replace(context, model=load_model(model))
        except ModelError as error:
            result = judge(spec, replace(context, model=None), key)
            return Result((*run_rules("model file", Source(model, "model"), error), *result.findings), None)
    result = judge(spec, context, key)
    if result.plan is None:
        result = Result(
            with_nearest(spec, key, result.findings, lambda other: judge(other, context, key).findings), None
        )
    return result


def compile(
    spec: Spec,
    *,
    cluster: Cluster | None = None,
    model: ModelSpec | str | None = None,
    batch: BatchSpec | None = None,
    megatron: MegatronSettings | None = None,
    order: str = DEFAULT_ORDER,
    key: str | None = None,
) -> Plan:
    """The plan of an allocation; arguments as for `check`. Raises `AllocationError` with all findings."""
    result = check(spec, cluster=cluster, model=model, batch=batch, megatron=megatron, order=order, key=key)
    if result.plan is None:
        raise AllocationError(result.findings)
    return result.plan


def judge(spec: Spec, context: Context, key: str | None = None) -> Result:
    """`check` without suggestions, with the model already read."""
    request, source, findings = _request(spec, context.cluster, key)
    if not request.groups:
        return Result(tuple(findings), None)
    request, star_findings = fill_stars(request, source)
    findings += star_findings
    for engine in request.engines:
        findings += _engine_findings(engine, context)
    placed: tuple[Gpus, ...] = ()
    if not has_errors(star_findings):
        placed, placement_findings = place(request, source)
        findings += placement_findings
    plan = None if has_errors(findings) else _plan(request, placed, context.order)
    return Result(tuple(findings), plan)


def _engine_findings(engine: Engine, context: Context) -> list[Finding]:
    """The findings of every rule that has what it needs."""
    kind, source, model, batch = engine.backend.kind, engine.source, context.model, context.batch
    settings = context.megatron
    findings = run_rules(kind, source, engine, context.order)
    if isinstance(model, ModelSpec):
        findings += run_rules("model", source, engine, model)
        findings += run_rules(f"{kind} model", source, engine, model)
    if kind == SERVER:
        return findings
    if engine.backend.name == "megatron":
        findings += run_rules("settings", source, engine, settings)
        if isinstance(model, ModelSpec):
            findings += run_rules("settings model", source, engine, settings, model)
    if batch is None:
        return findings
    wrong = run_rules("batch", source, engine, batch)
    findings += wrong
    if not wrong:
        findings += run_rules("good batch", source, engine, batch)
        if engine.backend.name == "megatron":
            findings += run_rules("settings batch", source, engine, settings, batch)
        if isinstance(model, ModelSpec):
            findings += run_rules("batch model", source, engine, batch, model)
    return findings


def _request(spec: Spec, cluster: Cluster | None, key: str | None) -> tuple[Request, Source, list[Finding]]:
    """Reads all texts. The source is what findings about several engines refer to."""
    if isinstance(spec, str):
        source = Source(spec, key)
        tree, findings = read(source)
        groups = [[resolve(member, source, None) for member in group.members] for group in tree.groups]
    else:
        fields = sorted(spec.items(), key=lambda item: (*ROLE_ORDER, item[0]).index(item[0]))
        source, findings, groups = _fields(fields)
    engines = [engine for group in groups for engine in group]
    for engine in engines:
        findings += run_rules("word", engine.source, engine)
    if isinstance(spec, str):
        findings += run_rules("roles", source, engines)
    return Request(tuple(map(tuple, groups)), cluster), source, findings


def _fields(fields: list[tuple[str, str]]) -> tuple[Source, list[Finding], list[list[Engine]]]:
    """Reads one member per config field. Fields with the same explicit GPU ids are colocated."""
    findings: list[Finding] = []
    groups: list[list[Engine]] = []
    for role, text in fields:
        source = Source(text, f"{role}.backend")
        tree, found = read(source)
        findings += found or run_rules("field", source, tree, role)
        for member in list(tree.members)[:1]:
            engine = resolve(member, source, role)
            same = [group for group in groups if member.gpus and group[0].node.gpus == member.gpus]
            if same:
                same[0].append(engine)
            else:
                groups.append([engine])
    if len(fields) == 1:
        return source, findings, groups
    text = " + ".join(text for _, text in fields)
    return Source(text, " + ".join(f"{role}.backend" for role, _ in fields)), findings, groups


@rule("ALLOC-MODEL", "model file", source="the model's config.json")
def model_readable(error: ModelError) -> Iterator[Problem]:
    """The model must be found and its config complete; wrong and unknown fields are named."""
    yield Problem(str(error))


@rule("ALLOC-FIELD-MEMBERS", "field", source="AReaL's per-engine fields")
def one_member_per_field(tree: Allocation, role: str) -> Iterator[Problem]:
    """A per-engine field describes that engine; a whole allocation has its own field."""
    members = list(tree.members)
    if len(members) > 1:
        help = "write the whole allocation in `allocation_mode`"
        yield Problem(f"{role}.backend holds {len(members)} engines, it takes one", (members[1].span,), help)


@rule("ALLOC-NAME-KEY", "field", source="AReaL's per-engine fields")
def name_agrees_with_field(tree: Allocation, role: str) -> Iterator[Problem]:
    """The field already says the engine's role; another name in the string contradicts it."""
    for member in tree.members:
        if member.name and member.name.text != role:
            yield Problem(f"the engine is called `{member.name}` in the field of `{role}`", (member.name.span,))


@rule("ALLOC-NAME-TWICE", "roles", source="the allocation language")
def names_unique(engines: list[Engine]) -> Iterator[Problem]:
    """A name stands for one engine."""
    first: dict[str, Word] = {}
    for engine in engines:
        name = engine.node.name
        if name and first.setdefault(name.text, name) is not name:
            yield Problem(f"two engines are called `{name}`", (name.span, first[name.text].span))


@rule("ALLOC-NAME-NEEDED", "roles", source="the allocation language")
def roles_are_clear(engines: list[Engine]) -> Iterator[Problem]:
    """A lone trainer is the actor and a lone kind of server the rollout; beyond that names say who is who."""
    for engine in engines:
        if engine.node.name:
            continue
        same = [other for other in engines if other.backend.kind == engine.backend.kind]
        if len(engines) > 2 or len(same) > 1 or any(o.role == engine.role for o in engines if o is not engine):
            role = engine.role if len(same) == 1 else "critic" if engine.backend.kind != SERVER else "rollout"
            help = f"write for example `{engine.node.backend}[{role}]:…`"
            message = f"`{engine.node.backend}` needs a name: its role cannot be told from the string"
            yield Problem(message, (engine.node.backend.span,), help)


def _plan(request: Request, placed: tuple[Gpus, ...], order: str) -> Plan:
    engines = list(request.engines)
    cluster = request.cluster
    if cluster is None:
        top = max(gpus.stop for ids in placed for gpus in ids)
        cluster = Cluster(math.ceil(top / DEFAULT_GPUS_PER_NODE), DEFAULT_GPUS_PER_NODE)
    plans = tuple(_engine_plan(e, gpus, cluster, order) for e, gpus in zip(engines, placed, strict=True))
    tree = Allocation(tuple(Group(tuple(map(_compiled_member, group))) for group in request.groups))
    roles = tuple(tuple(engine.role for engine in group) for group in request.groups)
    return Plan(str(tree), cluster, plans, roles, order)


def _compiled_member(engine: Engine) -> Member:
    """The member with `d*` filled in and, where it came from a config field, its role as name."""
    node = engine.node
    name = node.name or (Word(engine.role) if engine.source.key and engine.source.key.endswith(".backend") else None)
    attn = tuple(Dim("d", str(engine.dp)) if dim.count == "*" else dim for dim in node.layout.attn)
    return Member(node.backend, Layout(attn, node.layout.ffn), name, node.gpus)


def _engine_plan(engine: Engine, gpus: Gpus, cluster: Cluster, order: str) -> EnginePlan:
    trainer = engine.backend.kind != SERVER
    edp = engine.world // engine.expert_block if trainer and engine.backend.folds else 1
    sizes = ParallelSizes(engine.tp, engine.pp, engine.cp, engine.dp, engine.ep, engine.etp, edp, engine.vpp)
    text = str(replace(_compiled_member(engine), gpus=()))
    return EnginePlan(
        engine.role, engine.backend.name, engine.backend.kind, text, sizes, gpus, cluster.n_gpus_per_node, order
    )
