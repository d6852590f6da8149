"""The run's allocation, compiled, and what the engine asks of it beyond the language."""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from itertools import combinations
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

import allocation
from allocation import Allocation, EnginePlan, Finding, Plan, RoleSettings, Severity, Source, parse
from allocation.diagnostics import has_errors
from allocation.language.reading import read
from allocation.language.spelling import spell
from allocation.language.syntax import Group, Member
from allocation.model_spec import ModelSpec
from allocation.settings import BatchSpec, MegatronSettings, MemorySettings, Workload
from areal_like.config.findings import finding
from areal_like.config.schema import SERVER_RESERVE, MegatronConfig, RunConfig, TrainerRole
from areal_like.preflight.machine import device_of
from areal_like.preflight.memory import memory_settings, of_trainer, with_keys
from areal_like.preflight.roles import as_actor, of_role
from areal_like.trainer.environment import DETERMINISTIC
from areal_like.trainer.megatron.options import check_overrides, recomputed

_KEYS = {
    "ALLOC-BATCH-MINIBATCHES": "actor.ppo_n_minibatches",
    "ALLOC-PACKED-LENGTH": "actor.mb_spec.max_tokens_per_mb",
    "ALLOC-SEQUENCE-POSITIONS": "gconfig.max_new_tokens",
    "ALLOC-RECOMPUTE": "actor.megatron.recompute_granularity",
    "ALLOC-DISPATCHER": "actor.megatron.moe_token_dispatcher_type",
    "ALLOC-DEEPEP": "actor.megatron.override_transformer_config.moe_enable_deepep",
    "ALLOC-OVERLAP-GATHER": "actor.megatron.overlap_param_gather",
    "ALLOC-DETERMINISTIC-NCCL": "actor.megatron.use_deterministic_algorithms",
}
_CHECKED_ELSEWHERE = ("ALLOC-UNTRAINED", "ALLOC-QUANTIZED")  # by `check_model`, as errors
_VALUES = {"ALLOC-DISPATCHER": "alltoall", "ALLOC-DEEPEP": "false", "ALLOC-OVERLAP-GATHER": "false"}  # that would do
# Where roles have fields, a key and not `|` says who shares GPUs: what it says, what it might say, and what else helps.
_STRATEGIES = {
    "ALLOC-COLOCATE-SIZE": ("colocation", "separation", "give them equally many GPUs"),
    "ALLOC-CLUSTER-SIZE": ("separation", "colocation", "make the layouts smaller"),
}
_KINDS = {"actor": "trainer", "rollout": "server", "ref": "trainer", "critic": "trainer", "reward": "server"}
_BACKENDS = {"trainer": ("megatron", "fsdp"), "server": ("sglang",)}


class Compile(Protocol):
    """`allocation.check` with what is known of a run; `colocated` other than its configuration says."""

    def __call__(self, spec: str | Mapping[str, str], *, colocated: Mapping[str, str] = ...) -> allocation.Result: ...


def find_plan(
    config: RunConfig, model: ModelSpec | None, role_models: Mapping[TrainerRole, ModelSpec | None] | None = None
) -> tuple[Plan | None, list[Finding]]:
    """Compile `allocation_mode`, or each role's `backend`, for the cluster; without errors there is a plan.

    `model` is the actor's, `role_models` are those of the other roles on trainer ranks.
    """
    if findings := list(_fields(config)):
        return None, findings
    settings, findings = _megatron(config)
    memory = memory_settings(config, model)
    own, of_roles = _own(config, role_models or dict.fromkeys(config.further_roles, model), memory)
    findings += of_roles
    compile = partial(
        allocation.check,
        key="allocation_mode" if config.allocation_mode else None,
        cluster=allocation.Cluster(config.cluster.n_nodes, config.cluster.n_gpus_per_node),
        model=model,
        batch=_batch(config),
        megatron=settings,
        own=own,
        colocated=_find_colocated(config),
        shared=dict.fromkeys(config.further_roles, "actor"),
        memory=memory,
    )
    result = compile(config.allocation_mode or _backends(config))
    told = (found for found in result.findings if found.code not in _CHECKED_ELSEWHERE)
    found_here = dict.fromkeys(_key(_of_reward(found), config, model) for found in told)
    findings += [found if config.allocation_mode else _with_strategy(found, config, compile) for found in found_here]
    if result.plan is not None:
        findings += _roles(config, result.plan)
        if not has_errors(findings):
            findings += [_spread(config, engine, compile) for engine in _spanning(result.plan)]
            findings += _check_beside(config, result.plan, compile)
    if result.plan is None or has_errors(findings):
        return None, findings
    plan, of_shared = _with_shared(config, result.plan, own)
    said = {(found.code, found.message) for found in findings}  # of the actor, in the same layout
    findings += [found for found in of_shared if (found.code, found.message) not in said]
    return None if has_errors(findings) else plan, findings


def workloads(config: RunConfig, models: Mapping[TrainerRole, ModelSpec | None]) -> dict[str, Workload]:
    """Return the workload of each role whose model is known, and of the servers, for the memory model."""
    if (model := models["actor"]) is None:
        return {}
    memory = memory_settings(config, model) or MemorySettings()
    own, _ = _own(config, models, memory)
    actor = Workload(model, _megatron(config)[0], memory, _batch(config))
    known = {role: (it, it.model) for role, it in own.items() if it.model is not None}
    works = {role: Workload(of, it.megatron, it.memory or memory, it.batch) for role, (it, of) in known.items()}
    return {"actor": actor, "rollout": actor, **works}


def _backends(config: RunConfig) -> dict[str, str]:
    backends = {"actor": config.actor.backend, "rollout": config.rollout.backend}
    backends |= {role: section.backend for role, section in config.further_roles.items()}
    if config.reward.model is not None:
        backends["reward"] = config.reward.model.backend
    return {role: text for role, text in backends.items() if text is not None}


def _find_colocated(config: RunConfig, moved: Collection[TrainerRole] = ()) -> dict[str, str]:
    """Return the role whose GPUs each role shares; `moved` roles take the other strategy."""
    strategies = {role: section.scheduling_strategy for role, section in config.further_roles.items()}
    return {role: it.target for role, it in strategies.items() if (it.type == "colocation") != (role in moved)}


def _own(
    config: RunConfig, models: Mapping[TrainerRole, ModelSpec | None], memory: MemorySettings | None
) -> tuple[dict[str, RoleSettings], list[Finding]]:
    """Return the configuration that each role beside the actor is judged by."""
    own: dict[str, RoleSettings] = {}
    findings: list[Finding] = []
    for role, section in config.further_roles.items():
        played = as_actor(config, role)
        settings, found = _megatron(played)
        own[role] = RoleSettings(models[role], _batch(played), settings, memory and of_trainer(memory, played.actor))
        findings += [of_role(other, role, section) for other in found if section.megatron is not None]
    if config.reward.model is not None:
        own["reward"] = RoleSettings(None, None, MegatronSettings())  # SGLang judges it
    return own, findings


def _with_shared(config: RunConfig, plan: Plan, own: Mapping[str, RoleSettings]) -> tuple[Plan, list[Finding]]:
    """The plan with the roles that have no layout of their own: they have the actor's, on its GPUs."""
    actor = plan.engine("actor")
    text, findings = actor.text.replace("[actor]", ""), list[Finding]()
    present = {engine.role for engine in plan.engines}
    for role in [role for role in config.further_roles if role not in present]:
        settings = own[role]
        judged = allocation.check({role: text}, model=settings.model, batch=settings.batch, megatron=settings.megatron)
        findings += [_key(found, config, settings.model) for found in judged.findings]
        groups = tuple((*group, role) if "actor" in group else group for group in plan.groups)
        member = f"{actor.backend}[{role}]:{text.partition(':')[2]}"
        plan = replace(plan, engines=(*plan.engines, replace(actor, role=role, text=member)), groups=groups)
    return plan, findings


def _batch(config: RunConfig) -> BatchSpec:
    return BatchSpec(
        n_prompts=config.train_dataset.batch_size,
        n_samples=config.gconfig.n_samples,
        n_minibatches=config.actor.ppo_n_minibatches,
        max_length=config.longest_sequence,
        max_tokens_per_mb=config.actor.mb_spec.max_tokens_per_mb,
    )


def _megatron(config: RunConfig) -> tuple[MegatronSettings, list[Finding]]:
    """The Megatron settings that the rules know; overrides that they do not know are Megatron-core's to judge."""
    megatron, section = config.actor.megatron, "actor.megatron.override_transformer_config"
    overrides = megatron.override_transformer_config
    refused = {problem.name for problem in check_overrides(overrides, device="cuda")}  # those are findings already
    known = {field.name for field in fields(MegatronSettings)}
    settings = {
        **{name: value for name, value in overrides.items() if name in known - refused},
        **{name: getattr(megatron, name) for name in MegatronConfig.model_fields if name in known},
        **_find_recomputed(megatron),
        "overlap_grad_reduce": megatron.overlap_grad_reduce is not False,
        "offload": config.actor.offload,
        "deterministic_mode": megatron.use_deterministic_algorithms,
        "nccl_algo": config.actor.env_vars.get("NCCL_ALGO")
        or os.environ.get("NCCL_ALGO")
        or DETERMINISTIC["NCCL_ALGO"],
    }
    try:
        return TypeAdapter(MegatronSettings).validate_python(settings), []
    except ValidationError as error:
        problems = {str(problem["loc"][0]): problem["msg"] for problem in error.errors()}
        findings = [finding("RUN-MEGATRON-SETTING-TYPE", f"{section}.{key}", why) for key, why in problems.items()]
        return MegatronSettings(), findings


def _find_recomputed(megatron: MegatronConfig) -> dict[str, Any]:
    """Return the recomputed modules; with full recomputation `preflight/megatron.py` judges them."""
    modules = megatron.recompute_modules if megatron.recompute_granularity != "full" else None
    return {"recompute_modules": modules or (), "moe_layer_recompute": False, **recomputed(megatron)}


def _of_reward(found: Finding) -> Finding:
    """The finding with the key of the reward model's layout, which is not called as its role is."""
    key = re.sub(r"\breward\.backend", _backend_key("reward"), found.source.key or "")
    return replace(found, source=replace(found.source, key=key or None))


def _key(found: Finding, config: RunConfig, model: ModelSpec | None) -> Finding:
    """The finding about the key that is to be changed, where that is not the layout."""
    key, help = _KEYS.get(found.code), found.help
    if found.code == "ALLOC-MEMORY":
        return with_keys(found, config)
    if found.code == "ALLOC-LAYERS":
        help = help and re.sub(r"num_layers_in_\w+=", r"actor.megatron.override_transformer_config.\g<0>", help)
        return _of_own(replace(found, help=help), config)
    if key is None:
        return found
    if found.code == "ALLOC-PACKED-LENGTH" and help is not None:
        help = re.sub(r"set \w+ to (\d+)", rf"write {key}=\1", help)
    if found.code == "ALLOC-SEQUENCE-POSITIONS" and model is not None:
        key, others = _longest(config)
        room = model.max_positions - others - SERVER_RESERVE
        help = f"write {key}={room} or less" if room > 0 else "use shorter prompts (max_prompt_length)"
    if found.code in _VALUES:
        help = f"write {key}={_VALUES[found.code]}"
    return _of_own(replace(found, source=Source("", key), spans=(), help=help), config, _role_of(found))


def _of_own(found: Finding, config: RunConfig, role: Any = None) -> Finding:
    """The finding with the keys of the role that it is about, where that has its own."""
    role = role or _role_of(found)
    section = config.further_roles.get(role) if role not in ("actor", "rollout") else None
    return of_role(found, role, section) if section else found


def _longest(config: RunConfig) -> tuple[str, int]:
    """The key that bounds a sequence, and how many of its tokens that does not count."""
    if "workflow" in config.workflows and config.episode.max_tokens is not None:
        return "episode.max_tokens", 0
    return "gconfig.max_new_tokens", config.longest_sequence - config.gconfig.max_new_tokens


def _with_strategy(found: Finding, config: RunConfig, compile: Compile) -> Finding:
    """The finding with the keys that place roles, if it is about where roles are: those of the fewest that will do."""
    present, other, first = _STRATEGIES.get(found.code, ("", "", ""))
    sections = config.further_roles.items()
    able = [role for role, it in sections if it.backend and it.scheduling_strategy.type == present]
    for moved in (some for n in range(1, len(able) + 1) for some in combinations(able, n)):
        after = compile(_backends(config), colocated=_find_colocated(config, moved))
        if not any(other.code in _STRATEGIES and other.severity == Severity.ERROR for other in after.findings):
            said = " ".join(f"{role}.scheduling_strategy.type={other}" for role in moved)
            return replace(found, help=f"{first}, or write {said}")
    return replace(found, help=first) if able else found


def _role_of(found: Finding) -> Any:
    """Return the role a finding is about: by its field, or by the member of the allocation that it marks."""
    if found.key and found.key.endswith(".backend"):
        return found.key.removesuffix(".backend")
    for member in read(found.source)[0].members:
        if found.span and member.name and member.span.start <= found.span.start < member.span.end:
            return member.name.text
    return "actor"


def _fields(config: RunConfig) -> Iterator[Finding]:
    """The layout is said once: for the whole run, or by each role; further roles may do without."""
    whole, backends = config.allocation_mode is not None, _backends(config)
    for role in backends if whole else ():
        key, message = _backend_key(role), "allocation_mode gives the layout already"
        yield finding("RUN-LAYOUT-TWICE", key, message, f"write {key}=null, or allocation_mode=null")
    for role, example in (("actor", "megatron:d2"), ("rollout", "sglang:d1")):
        if not whole and role not in backends:
            key, message = f"{role}.backend", "no layout is given, and no allocation_mode either"
            yield finding("RUN-LAYOUT-MISSING", key, message, f"write for example {key}={example}")
    if not whole and config.reward.model is not None and "reward" not in backends:
        key, message = _backend_key("reward"), "no layout is given for the reward model"
        yield finding("RUN-LAYOUT-REWARD", key, message, f"write for example {key}=sglang:d1")


def _roles(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Check backends by role: Megatron and FSDP train and score, SGLang generates, and each role has its section."""
    present = {engine.role: engine for engine in plan.engines}
    about = partial(_find_subject, config)
    named = {"actor": "actor", "rollout": "rollout"} | ({"reward": "reward model"} if config.reward.model else {})
    for role, name in named.items():
        if role not in present:
            kind = _KINDS[role]
            message = f"the allocation has no {kind} for the {name}"
            yield about("RUN-ROLE-MISSING", role, message, f"add {_BACKENDS[kind][0]}[{role}]:…")
    for role, engine in present.items():
        if role in ("ref", "critic") and role not in config.further_roles:
            message = f"this run has no {role}: the section {role} is missing"
            yield about("RUN-ROLE-SECTION", role, message, f"add `{role}: {{}}`")
        elif role == "reward" and config.reward.model is None:
            message = "this run has no reward model: reward.model is missing"
            yield about("RUN-ROLE-REWARD-MODEL", role, message, "leave it out")
        elif role not in _KINDS:
            roles = "actor, rollout, ref, critic and reward"
            message = f"no part of a run is called {role}; the roles are {roles}"
            yield about("RUN-ROLE-UNKNOWN", role, message, "leave it out")
        elif engine.backend not in (able := _BACKENDS[_KINDS[role]]):
            code = "RUN-ROLE-BACKEND"
            message = f"{engine.backend} is known to the compiler only; the {role} runs on {' or '.join(able)}"
            if engine.kind != _KINDS[role]:
                kinds = f"it is a {engine.kind}, the {role} needs a {_KINDS[role]}"
                code, message = "RUN-ROLE-KIND", f"{engine.backend} cannot be the {role}: {kinds}"
            yield about(code, role, message, f"write {able[0]}:…")
        elif engine.backend == "fsdp" and engine.sizes.tp > 1:
            d, c = engine.sizes.dp * engine.sizes.tp, engine.sizes.cp
            layout = f"fsdp:d{d}" + (f"c{c}" if c > 1 else "")
            message = "the FSDP trainer has no tensor parallelism"
            yield about("RUN-ROLE-FSDP-TENSOR", role, message, f"write {layout}, or megatron:… for other dimensions")
        elif engine.kind == "server" and engine.sizes.pp > 1:
            message = "SGLang does not bring new weights to all pipeline stages of a server"
            help = f"write t{engine.sizes.pp} instead of p{engine.sizes.pp}, for example"
            yield about("RUN-ROLE-SERVER-PIPELINE", role, message, help)


def _spanning(plan: Plan) -> Iterator[EnginePlan]:
    """Engines whose servers do not lie on one node each: nothing here starts a server's other half elsewhere."""
    for engine in plan.engines:
        if engine.kind == "server" and any(len({d.node for d in server.devices}) > 1 for server in engine.servers):
            yield engine


def _spread(config: RunConfig, engine: EnginePlan, compile: Compile) -> Finding:
    gpus = len(engine.servers[0].devices)
    message = f"a server of {gpus} GPUs would span nodes, and every server runs on one"
    found = _find_subject(config, "RUN-ROLE-SERVER-NODES", engine.role, message, "make more servers of fewer GPUs")
    return replace(found, nearest=tuple(_narrower(config, engine, compile)))


def _narrower(config: RunConfig, engine: EnginePlan, compile: Compile) -> Iterator[str]:
    """The same layout with the engine's widest servers that fit in a node, on the same GPUs."""
    role, backends = engine.role, _backends(config)
    text = config.allocation_mode or backends[role]
    names = {f"[{role}]", *([None] if role == "rollout" or not config.allocation_mode else [])}
    found = next((it for it in re.finditer(r"sglang(\[\w+\])?:[\w*]+", text) if it[1] in names), None)
    total = engine.sizes.dp * engine.sizes.tp
    for gpus in range(config.cluster.n_gpus_per_node, 0, -1):
        if found and total % gpus == 0:
            other = f"{text[: found.start()]}sglang{found[1] or ''}:d{total // gpus}t{gpus}{text[found.end() :]}"
            plan = compile(other if config.allocation_mode else backends | {role: other}).plan
            if plan and not [*_roles(config, plan)] and role not in [it.role for it in _spanning(plan)]:
                yield other
                return


def _check_beside(config: RunConfig, plan: Plan, compile: Compile) -> Iterator[Finding]:
    """A reward model's servers take what memory a GPU has left, whatever other engines need there."""
    if device_of(config.device) == "cuda" and (others := _with_reward(plan)):
        message = f"the reward model's servers share GPUs with {' and '.join(others)}, and take the memory there"
        help = "give them GPUs of their own; other layouts may have to be smaller"
        found = _find_subject(config, "RUN-ROLE-REWARD-GPUS", "reward", message, help)
        moved = compile(apart := _check_apart(config)).plan
        offered = apart if isinstance(apart, str) else apart["reward"]
        yield replace(found, nearest=(offered,) if moved and not _with_reward(moved) else ())


def _with_reward(plan: Plan) -> list[str]:
    """The roles that share GPUs with the reward model."""
    gpus = {device for engine in plan.engines if engine.role == "reward" for device in engine.devices}
    return [engine.role for engine in plan.engines if engine.role != "reward" and gpus & set(engine.devices)]


def _check_apart(config: RunConfig) -> str | dict[str, str]:
    """The layouts with the reward model on the next free GPUs."""
    backends = _backends(config)
    if not config.allocation_mode:
        return backends | {"reward": backends["reward"].partition("@")[0]}
    groups = [group.members for group in parse(config.allocation_mode).groups]
    others = [tuple(it for it in group if _name(it) != "reward") for group in groups]
    moved = [(replace(it, gpus=()),) for group in groups for it in group if _name(it) == "reward"]
    return spell(Allocation(tuple(Group(group) for group in (*others, *moved) if group)))


def _name(member: Member) -> str | None:
    return member.name.text if member.name else None


def _find_subject(config: RunConfig, code: str, role: str, message: str, help: str) -> Finding:
    key = "allocation_mode" if config.allocation_mode else _backend_key(role)
    return finding(code, key, message, help)


def _backend_key(role: str) -> str:
    return "reward.model.backend" if role == "reward" else f"{role}.backend"
