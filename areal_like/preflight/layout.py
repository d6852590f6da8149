"""The run's allocation, compiled, and the engine's requirements beyond the language."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Protocol

import allocation
from allocation import Allocation, EnginePlan, Finding, Plan, RoleSettings, Severity, parse
from allocation.diagnostics import has_errors
from allocation.language.spelling import spell
from allocation.language.syntax import Dim, Group, Layout, Member, Word
from allocation.model_spec import ModelSpec
from allocation.settings import MegatronSettings, MemorySettings, Workload
from areal_like.core.config.findings import finding
from areal_like.core.config.schema import SCORERS, RunConfig, TrainerRole
from areal_like.core.rollout.backends import backend_names, find_backend, register_backends
from areal_like.preflight.compiled import backend_key, with_keys
from areal_like.preflight.machine import device_of
from areal_like.preflight.megatron_settings import megatron_settings
from areal_like.preflight.memory import memory_settings, of_trainer
from areal_like.preflight.view import Models, RoleView, view_roles

_CHECKED_ELSEWHERE = ("ALLOC-UNTRAINED", "ALLOC-QUANTIZED")  # by `check_model`, as errors
# Where roles have fields, a key and not `|` sets which roles share GPUs: its value, its other value, and other fixes.
_STRATEGIES = {
    "ALLOC-COLOCATE-SIZE": ("colocation", "separation", ("give them the same number of GPUs",)),
    "ALLOC-CLUSTER-SIZE": ("separation", "colocation", ("make the layouts smaller", "raise cluster.n_gpus_per_node")),
}
_KINDS = {
    "actor": "trainer",
    "rollout": "server",
    "ref": "trainer",
    "critic": "trainer",
    "reward": "server",
    "teacher": "server",
    "judge": "server",
}
_SCORERS = {"reward": "reward model", "teacher": "teacher", "judge": "judge"}
_SECTIONS = {"reward": "reward.model", "teacher": "teacher.path", "judge": "reward.judge.path"}
_TRAINERS = ("megatron", "fsdp")


class Compile(Protocol):
    """`allocation.check` with a run's facts; `colocated` may differ from its configuration."""

    def __call__(self, spec: str | Mapping[str, str], *, colocated: Mapping[str, str] = ...) -> allocation.Result: ...


def find_plan(
    config: RunConfig, model: ModelSpec | None, role_models: Models | None = None, image_share: float = 0.0
) -> tuple[Plan | None, list[Finding]]:
    """Compile `allocation_mode`, or each role's `backend`, for the cluster; without errors there is a plan.

    `model` is the actor's, `role_models` are the models of other roles on trainer ranks, `image_share` is the data's.
    """
    register_backends()
    if findings := list(_fields(config)):
        return None, findings
    models: Models = {**(role_models or dict.fromkeys(config.further_roles, model)), "actor": model}
    views, memory = _view_roles(config, models, image_share), memory_settings(config, model)
    actor = views["actor"]
    own = _collect_settings(config, views, memory)
    compile = partial(
        allocation.check,
        key="allocation_mode" if config.allocation_mode else None,
        cluster=allocation.Cluster(config.cluster.n_nodes, config.cluster.n_gpus_per_node),
        model=model,
        batch=actor.batch,
        megatron=megatron_settings(actor.engine),
        own=own,
        colocated=_find_colocated(config),
        shared=dict.fromkeys(config.further_roles, "actor"),
        memory=memory,
    )
    result = compile(config.allocation_mode or _backends(config))
    told = (found for found in result.findings if found.code not in _CHECKED_ELSEWHERE)
    found_here = dict.fromkeys(with_keys(found, views) for found in told)
    findings = [found if config.allocation_mode else _with_strategy(found, config, compile) for found in found_here]
    if result.plan is not None:
        findings += _roles(config, result.plan)
        if not has_errors(findings):
            findings += [_spread(config, engine, compile) for engine in _spanning(result.plan)]
            findings += _check_beside(config, result.plan, compile)
    if result.plan is None or has_errors(findings):
        return None, findings
    plan, of_shared = _with_shared(config, result.plan, own, views)
    said = {(found.code, found.message) for found in findings}  # of the actor, in the same layout
    findings += [found for found in of_shared if (found.code, found.message) not in said]
    return None if has_errors(findings) else plan, findings


def workloads(config: RunConfig, models: Models, image_share: float = 0.0) -> dict[str, Workload]:
    """Return the workload of each role whose model is known, and of the servers, for the memory model."""
    memory = memory_settings(config, models["actor"]) or MemorySettings()
    own = _collect_settings(config, _view_roles(config, models, image_share), memory)
    works = {
        role: Workload(it.model, it.megatron, it.memory or memory, it.batch)
        for role, it in own.items()
        if it.model is not None
    }
    return {**works, "rollout": works["actor"]} if "actor" in works else {}


def _view_roles(config: RunConfig, models: Models, image_share: float) -> dict[str, RoleView]:
    """Return the view of each role before there is a layout."""
    views = view_roles(config, models, image_share=image_share, device=device_of(config.device))
    return {view.role: view for view in views}


def _backends(config: RunConfig) -> dict[str, str]:
    backends = {"actor": config.actor.backend, "rollout": config.rollout.backend}
    backends |= {role: section.backend for role, section in config.further_roles.items()}
    backends |= {role: section.backend for role, section in config.scorers.items()}
    return {role: text for role, text in backends.items() if text is not None}


def _find_colocated(config: RunConfig, moved: Collection[TrainerRole] = ()) -> dict[str, str]:
    """Return the role whose GPUs each role shares; `moved` roles take the other strategy."""
    strategies = {role: section.scheduling_strategy for role, section in config.further_roles.items()}
    return {role: it.target for role, it in strategies.items() if (it.type == "colocation") != (role in moved)}


def _collect_settings(
    config: RunConfig, views: Mapping[str, RoleView], memory: MemorySettings | None
) -> dict[str, RoleSettings]:
    """Return the settings by which each role is judged; the servers' are the actor's."""
    own = {
        role: RoleSettings(
            view.model, view.batch, megatron_settings(view.engine), memory and of_trainer(memory, view.engine)
        )
        for role, view in views.items()
    }
    own |= {role: RoleSettings(None, None, MegatronSettings()) for role in config.scorers}  # SGLang judges it
    return own


def _with_shared(
    config: RunConfig, plan: Plan, own: Mapping[str, RoleSettings], views: Mapping[str, RoleView]
) -> tuple[Plan, list[Finding]]:
    """Return the plan with the roles that have no layout of their own: they have the actor's, on its GPUs."""
    actor, findings = plan.engine("actor"), list[Finding]()
    (member,) = parse(actor.text).members
    present = {engine.role for engine in plan.engines}
    for role in [role for role in config.further_roles if role not in present]:
        settings, text = own[role], _spell_groups([[replace(member, name=None)]])
        judged = allocation.check({role: text}, model=settings.model, batch=settings.batch, megatron=settings.megatron)
        findings += [with_keys(found, views) for found in judged.findings]
        groups = tuple((*group, role) if "actor" in group else group for group in plan.groups)
        engine = replace(actor, role=role, text=_spell_groups([[replace(member, name=Word(role))]]))
        plan = replace(plan, engines=(*plan.engines, engine), groups=groups)
    return plan, findings


def _with_strategy(found: Finding, config: RunConfig, compile: Compile) -> Finding:
    """Return a finding about placement with the keys that place roles: as few of them as possible."""
    if found.code not in _STRATEGIES:
        return found
    present, other, helps = _STRATEGIES[found.code]
    sections = config.further_roles.items()
    able = [role for role, it in sections if it.backend and it.scheduling_strategy.type == present]
    for moved in (some for n in range(1, len(able) + 1) for some in combinations(able, n)):
        after = compile(_backends(config), colocated=_find_colocated(config, moved))
        if not any(other.code in _STRATEGIES and other.severity == Severity.ERROR for other in after.findings):
            said = " ".join(f"{role}.scheduling_strategy.type={other}" for role in moved)
            return replace(found, help=f"{', '.join(helps)}, or write {said}")
    return replace(found, help=", or ".join(helps))


def _fields(config: RunConfig) -> Iterator[Finding]:
    """Check that the layout is set once: for the whole run, or by each role; further roles need none."""
    whole, backends = config.allocation_mode is not None, _backends(config)
    for role in backends if whole else ():
        key, message = backend_key(role), "allocation_mode already sets the layout of every role"
        yield finding("RUN-LAYOUT", key, message, f"write {key}=null, or allocation_mode=null")
    for role in ("actor", "rollout", *config.scorers):
        if not whole and role not in backends:
            key, example = backend_key(role), "megatron:d2" if role == "actor" else "sglang:d1"
            message = (
                f"no layout is given for the {_SCORERS[role]}"
                if role in _SCORERS
                else f"no layout is given: both {key} and allocation_mode are null"
            )
            yield finding("RUN-LAYOUT", key, message, f"write for example {key}={example}")


def _roles(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Check backends by role: Megatron and FSDP train and score, SGLang generates, and each role has its section."""
    present = {engine.role: engine for engine in plan.engines}
    about = partial(_find_subject, config)
    named = {"actor": "actor", "rollout": "rollout"} | {role: _SCORERS[role] for role in config.scorers}
    for role, name in named.items():
        if role not in present:
            kind = _KINDS[role]
            message = f"the allocation has no {kind} for the {name}"
            yield about("RUN-ROLE", role, message, f"add {_able(role)[0]}[{role}]:…")
    for role, engine in present.items():
        if role in ("ref", "critic") and role not in config.further_roles:
            message = f"this run has no {role}: the section {role} is missing"
            yield about("RUN-ROLE", role, message, f"add `{role}: {{}}`")
        elif role in SCORERS and role not in config.scorers:
            message = f"this run has no {_SCORERS[role]}: {_SECTIONS[role]} is missing"
            yield about("RUN-ROLE", role, message, "leave it out")
        elif role not in _KINDS:
            roles = "actor, rollout, ref, critic, reward, teacher and judge"
            message = f"no part of a run is called {role}; the roles are {roles}"
            yield about("RUN-ROLE", role, message, "leave it out")
        elif engine.backend not in (able := _able(role)):
            message = f"{engine.backend} is known to the compiler only; the {role} runs on {' or '.join(able)}"
            if engine.kind != _KINDS[role]:
                kinds = f"it is a {engine.kind}, the {role} needs a {_KINDS[role]}"
                message = f"{engine.backend} cannot be the {role}: {kinds}"
            yield about("RUN-ROLE-BACKEND", role, message, f"write {able[0]}:…")
        elif engine.kind == "server" and engine.sizes.pp > 1:
            message = "SGLang cannot update the weights of all pipeline stages of a server"
            help = f"write t{engine.sizes.pp} instead of p{engine.sizes.pp}, for example"
            yield about("RUN-ROLE-BACKEND", role, message, help)


def _able(role: str) -> Sequence[str]:
    """Return the backends that a role can have."""
    if _KINDS[role] == "trainer":
        return _TRAINERS
    return [name for name in backend_names() if role == "rollout" or find_backend(name).scorer_arguments is not None]


def _spanning(plan: Plan) -> Iterator[EnginePlan]:
    """Find engines with a server over several nodes: a run starts each server on one node."""
    for engine in plan.engines:
        if engine.kind == "server" and any(len({d.node for d in server.devices}) > 1 for server in engine.servers):
            yield engine


def _spread(config: RunConfig, engine: EnginePlan, compile: Compile) -> Finding:
    gpus = len(engine.servers[0].devices)
    message = f"a server of {gpus} GPUs would span nodes; every server must fit on one node"
    found = _find_subject(config, "RUN-ROLE-BACKEND", engine.role, message, "make more servers of fewer GPUs")
    return replace(found, nearest=tuple(_narrower(config, engine, compile)))


def _narrower(config: RunConfig, engine: EnginePlan, compile: Compile) -> Iterator[str]:
    """Yield the same layout with the engine's widest servers that fit in a node, on the same GPUs."""
    role, backends = engine.role, _backends(config)
    groups = [group.members for group in parse(config.allocation_mode or backends[role]).groups]
    names = (role, None) if role == "rollout" or not config.allocation_mode else (role,)
    ours = [it for group in groups for it in group if it.backend.text == "sglang" and _name(it) in names]
    total = engine.sizes.dp * engine.sizes.tp
    for gpus in range(config.cluster.n_gpus_per_node, 0, -1):
        if total % gpus == 0:
            layout = Layout((Dim("d", str(total // gpus)), Dim("t", str(gpus))))
            other = _spell_groups(
                [[replace(it, layout=layout) if it in ours else it for it in group] for group in groups]
            )
            plan = compile(other if config.allocation_mode else backends | {role: other}).plan
            if plan and not [*_roles(config, plan)] and role not in [it.role for it in _spanning(plan)]:
                yield other
                return


def _check_beside(config: RunConfig, plan: Plan, compile: Compile) -> Iterator[Finding]:
    """Check that scoring servers share no GPU: they allocate all free memory, including the needs of other engines."""
    for role in config.scorers if device_of(config.device) == "cuda" else ():
        if not (others := _find_neighbours(plan, role)):
            continue
        message = f"the {_SCORERS[role]}'s servers share GPUs with {' and '.join(others)} and would fill their memory"
        help = "give them GPUs of their own; other layouts may have to be smaller"
        found = _find_subject(config, "RUN-ROLE-REWARD-GPUS", role, message, help)
        moved = compile(apart := _check_apart(config, role)).plan
        offered = apart if isinstance(apart, str) else apart[role]
        yield replace(found, nearest=(offered,) if moved and not _find_neighbours(moved, role) else ())


def _find_neighbours(plan: Plan, role: str) -> list[str]:
    """Return the roles that share GPUs with this one."""
    gpus = {device for engine in plan.engines if engine.role == role for device in engine.devices}
    return [engine.role for engine in plan.engines if engine.role != role and gpus & set(engine.devices)]


def _check_apart(config: RunConfig, role: str) -> str | dict[str, str]:
    """Return the layouts with a role on the next free GPUs."""
    backends = _backends(config)
    if not config.allocation_mode:
        return backends | {role: backends[role].partition("@")[0]}
    groups = [group.members for group in parse(config.allocation_mode).groups]
    others = [[it for it in group if _name(it) != role] for group in groups]
    moved = [[replace(it, gpus=())] for group in groups for it in group if _name(it) == role]
    return _spell_groups([group for group in (*others, *moved) if group])


def _spell_groups(groups: Iterable[Iterable[Member]]) -> str:
    return spell(Allocation(tuple(Group(tuple(group)) for group in groups)))


def _name(member: Member) -> str | None:
    return member.name.text if member.name else None


def _find_subject(config: RunConfig, code: str, role: str, message: str, help: str) -> Finding:
    key = "allocation_mode" if config.allocation_mode else backend_key(role)
    return finding(code, key, message, help)
