"""The run's allocation, compiled, and what the engine asks of it beyond the language."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields, replace

from pydantic import TypeAdapter, ValidationError

import allocation
from allocation import Finding, Plan, Source
from allocation.diagnostics import has_errors
from allocation.model_spec import ModelSpec
from allocation.settings import BatchSpec, MegatronSettings
from areal_like.config.load import LoadedConfig
from areal_like.config.schema import MegatronConfig, RunConfig
from areal_like.config.unknown import known, known_findings
from areal_like.trainer.environment import rank_environment
from areal_like.trainer.megatron.options import check_overrides

_BACKENDS = {"actor": "megatron", "rollout": "sglang"}
_KEYS = {
    "ALLOC-BATCH-MINIBATCHES": "actor.ppo_n_minibatches",
    "ALLOC-PACKED-LENGTH": "actor.mb_spec.max_tokens_per_mb",
    "ALLOC-SEQUENCE-POSITIONS": "gconfig.max_new_tokens",
    "ALLOC-RECOMPUTE": "actor.megatron.recompute_granularity",
    "ALLOC-DETERMINISTIC-NCCL": "actor.megatron.use_deterministic_algorithms",
}
_KINDS = {"actor": "trainer", "rollout": "server"}


def check_layout(loaded: LoadedConfig, model: ModelSpec | None) -> tuple[list[Finding], Plan | None]:
    """Compile `allocation_mode`, or both roles' `backend`, for the cluster; without errors there is a plan.

    Of two backends that are not both known, the other one's errors are found. Raises UnknownSetting where that has no
    meaning either.
    """
    config = loaded.config
    whole = config.allocation_mode
    findings = known_findings(_fields(loaded)) if whole is None else list(_fields(loaded))
    if findings:
        return findings, None
    roles = {"actor": known(lambda: config.actor.backend), "rollout": known(lambda: config.rollout.backend)}
    backends = {role: backend for role, backend in roles.items() if backend is not None}
    settings, findings = _megatron(loaded)
    result = allocation.check(
        whole or backends,
        key="allocation_mode" if whole else None,
        cluster=known(lambda: allocation.Cluster(config.cluster.n_nodes, config.cluster.n_gpus_per_node)),
        model=model,
        batch=known(_batch, config),
        megatron=settings,
    )
    findings += [loaded.origins.locate(_keyed(finding)) for finding in result.findings]
    if result.plan is not None:
        findings += _roles(loaded, result.plan)
    if not whole and len(backends) < len(roles):  # idle GPUs and the next best layouts depend on the other one
        return [replace(finding, nearest=()) for finding in findings if has_errors([finding])], None
    return findings, None if has_errors(findings) else result.plan


def _batch(config: RunConfig) -> BatchSpec:
    return BatchSpec(
        n_prompts=config.train_dataset.batch_size,
        n_samples=config.gconfig.n_samples,
        n_minibatches=config.actor.ppo_n_minibatches,
        max_length=config.longest_sequence,
        max_tokens_per_mb=config.actor.mb_spec.max_tokens_per_mb,
    )


def _megatron(loaded: LoadedConfig) -> tuple[MegatronSettings, list[Finding]]:
    """The Megatron settings that the rules know; overrides that they do not know are Megatron-core's to judge."""
    config, section = loaded.config.actor.megatron, "actor.megatron.override_transformer_config"
    overrides = config.override_transformer_config
    refused = check_overrides(overrides, device="cuda")  # those are findings already
    settable = {field.name for field in fields(MegatronSettings)} - refused.keys()
    settings = {
        **{name: value for name, value in overrides.items() if name in settable},
        **(known(_recomputation, config) or {}),
        "use_distributed_optimizer": known(lambda: config.use_distributed_optimizer) is not False,
        "deterministic_mode": known(lambda: config.use_deterministic_algorithms) is True,
        "nccl_algo": os.environ.get("NCCL_ALGO") or rank_environment(device="cuda", deterministic=True)["NCCL_ALGO"],
    }
    try:
        return TypeAdapter(MegatronSettings).validate_python(settings), []
    except ValidationError as error:
        problems = {str(problem["loc"][0]): problem["msg"] for problem in error.errors()}
        findings = [loaded.origins.finding("RUN-MEGATRON", f"{section}.{key}", why) for key, why in problems.items()]
        return MegatronSettings(), findings


def _recomputation(config: MegatronConfig) -> dict[str, str | int | None]:
    return {
        "recompute_granularity": config.recompute_granularity,
        "recompute_method": config.recompute_method,
        "recompute_num_layers": config.recompute_num_layers,
    }


def _keyed(finding: Finding) -> Finding:
    """The finding about the key that is to be changed, where that is not the layout."""
    key = _KEYS.get(finding.code)
    return finding if key is None else replace(finding, source=Source("", key), spans=())


def _fields(loaded: LoadedConfig) -> Iterator[Finding]:
    """The layout is said once: for the whole run, or by each role."""
    config, origins = loaded.config, loaded.origins
    backends = {"actor.backend": config.actor.backend, "rollout.backend": config.rollout.backend}
    for key, backend in backends.items():
        if config.allocation_mode is None and backend is None:
            help = f"write for example {key}={'megatron:d2' if key == 'actor.backend' else 'sglang:d1'}"
            yield origins.finding("RUN-LAYOUT", key, "no layout is given, and no allocation_mode either", help)
        if config.allocation_mode is not None and backend is not None:
            message = f"allocation_mode ({origins.of('allocation_mode')}) gives the layout already"
            yield origins.finding("RUN-LAYOUT", key, message, f"set allocation_mode=null, or leave out {key}")


def _roles(loaded: LoadedConfig, plan: Plan) -> Iterator[Finding]:
    """Who can play which role: Megatron trains, SGLang generates, and there are no further roles."""
    present = {engine.role: engine for engine in plan.engines}
    missing = _BACKENDS.keys() - present.keys() if loaded.config.allocation_mode else ()
    for role in missing:
        yield _about(
            loaded, role, f"the allocation has no {_KINDS[role]} for the {role}", f"add {_BACKENDS[role]}[{role}]:…"
        )
    for role, engine in present.items():
        if role not in _BACKENDS:
            yield _about(loaded, role, f"this run has no {role}; its roles are actor and rollout", "leave it out")
        elif engine.kind != _KINDS[role]:
            message = f"{engine.backend} cannot be the {role}: it is a {engine.kind}, the {role} needs a {_KINDS[role]}"
            yield _about(loaded, role, message, f"write {_BACKENDS[role]}:…")
        elif engine.backend != _BACKENDS[role]:
            message = f"{engine.backend} is known to the compiler only; the {role} runs on {_BACKENDS[role]}"
            yield _about(loaded, role, message, f"write {_BACKENDS[role]}:…")
        elif engine.kind == "server" and engine.sizes.pp > 1:
            message = "SGLang does not bring new weights to all pipeline stages of a server"
            yield _about(loaded, role, message, f"write t{engine.sizes.pp} instead of p{engine.sizes.pp}, for example")


def _about(loaded: LoadedConfig, role: str, message: str, help: str) -> Finding:
    key = f"{role}.backend" if loaded.config.allocation_mode is None else "allocation_mode"
    return loaded.origins.finding("RUN-ROLE", key, message, help)
