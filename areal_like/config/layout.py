"""The run's allocation, compiled, and what the engine asks of it beyond the language."""

from __future__ import annotations

from collections.abc import Iterator

import allocation
from allocation import Finding, Plan
from allocation.diagnostics import has_errors
from areal_like.config.load import LoadedConfig

_BACKENDS = {"actor": "megatron", "rollout": "sglang"}
_KINDS = {"actor": "trainer", "rollout": "server"}


def check_layout(loaded: LoadedConfig) -> tuple[list[Finding], Plan | None]:
    """Compile `allocation_mode`, or both roles' `backend`, for the cluster; without errors there is a plan."""
    config = loaded.config
    findings = list(_fields(loaded))
    if findings:
        return findings, None
    cluster = allocation.Cluster(config.cluster.n_nodes, config.cluster.n_gpus_per_node)
    if config.allocation_mode is not None:
        result = allocation.check(config.allocation_mode, cluster=cluster, key="allocation_mode")
    else:
        members = {"actor": str(config.actor.backend), "rollout": str(config.rollout.backend)}
        result = allocation.check(members, cluster=cluster)
    findings = [loaded.origins.locate(finding) for finding in result.findings]
    if result.plan is not None:
        findings += _roles(loaded, result.plan)
    return findings, None if has_errors(findings) else result.plan


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
    for role in _BACKENDS.keys() - present.keys():
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


def _about(loaded: LoadedConfig, role: str, message: str, help: str) -> Finding:
    key = f"{role}.backend" if loaded.config.allocation_mode is None else "allocation_mode"
    return loaded.origins.finding("RUN-ROLE", key, message, help)
