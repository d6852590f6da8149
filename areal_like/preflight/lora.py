"""Adapters (`actor.use_lora`) against the model and the layout: modules without adapters, and the trained share."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from allocation.adapters import adaptable_layers, adapter_parameters, adapts_experts, merged_parameters
from allocation.diagnostics import Finding, Severity
from allocation.model_spec import ModelSpec
from allocation.parameters import total_parameters
from allocation.plan import Plan
from areal_like.config.findings import ConfigError, finding, nearest_words
from areal_like.config.schema import ALL_LINEAR, ActorConfig, RunConfig
from areal_like.preflight.weights import layer_matrices

JOINED = ("q_proj", "k_proj", "v_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
_KEY = "actor.target_modules"
_FUSED = "use_transformer_engine_op_fuser"


def trained_share(config: RunConfig, model: ModelSpec) -> float:
    """Return the part of a model's parameters that is trained: 1 without adapters."""
    return trained_parameters(config, model) / total_parameters(model) if config.actor.use_lora else 1.0


def trained_parameters(config: RunConfig, model: ModelSpec) -> int:
    """Return the parameters of the adapters, all of several."""
    one = adapter_parameters(model, config.actor.lora_rank, lambda name: _adapts(config.actor, name))
    return max(1, len(config.adapters)) * one


def served_parameters(config: RunConfig, model: ModelSpec) -> int:
    """Return the parameters of adapters that a server has memory for: of all adapters and of one more."""
    if not (config.actor.use_lora and config.weight_update.adapters):
        return 0
    adapters = max(1, len(config.adapters))
    return trained_parameters(config, model) // adapters * (adapters + 1)


def merged_experts(config: RunConfig, model: ModelSpec) -> int:
    """Return the parameters of a layer's experts that are merged with adapters: 0 without adapters of experts."""
    return merged_parameters(model, lambda name: _adapts(config.actor, name)) if config.actor.use_lora else 0


def _adapts(actor: ActorConfig, name: str) -> bool:
    return ALL_LINEAR in actor.target_modules or name in actor.target_modules


def check_lora(config: RunConfig, spec: ModelSpec | None, plan: Plan | None) -> Iterator[Finding]:
    """Check modules that the model lacks or that have no adapter; report how much is trained."""
    actor = config.actor
    if not actor.use_lora or spec is None:
        return
    problems = [*_names(actor, spec, plan), *(_on_megatron(actor, spec, plan) if plan is not None else ())]
    yield from problems
    if not problems:
        trained, total = trained_parameters(config, spec), total_parameters(spec)
        message = f"{trained:,} parameters of adapters are trained, {trained / total:.2%} of the model's {total:,}"
        yield finding("RUN-LORA", "actor.use_lora", message, severity=Severity.NOTE)
    if actor.init_model is not None:
        message = "the frozen weights under the adapters are random, so little can be learned"
        help = "train the model whole first, and name its checkpoint in actor.path"
        yield finding("RUN-LORA", "actor.init_model", message, help, severity=Severity.WARNING)


def _names(actor: ActorConfig, spec: ModelSpec, plan: Plan | None) -> Iterator[Finding]:
    """Find names of no layer, and of layers without adapters."""
    known = _linear_layers(actor, spec)
    for name in actor.target_modules:
        if name not in (*known, ALL_LINEAR):
            message = f"the model has no linear layer {name}; it has {', '.join(known)}"
            yield finding("RUN-LORA-LAYER", _KEY, message, nearest=nearest_words(name, known) or [ALL_LINEAR])
    if spec.experts and (asked := [name for name in actor.target_modules if name in (*FEED_FORWARD, ALL_LINEAR)]):
        yield from _experts(asked, spec, plan)


def _experts(asked: Sequence[str], spec: ModelSpec, plan: Plan | None) -> Iterator[Finding]:
    """Find adapters of experts that the family or the backend does not have."""
    backend = "fsdp" if plan is None else plan.engine("actor").backend  # a finding about the layout has the reason
    split = JOINED if plan is not None and _splits_groups(spec, plan) else ()
    others = [name for name in adaptable_layers(spec) if name not in split]
    help = f"write {_KEY}=[{','.join(others)}]"
    if not adapts_experts(spec):
        where = f"of {spec.family} are unsupported"
    elif backend != "fsdp":
        where, help = "are unsupported on Megatron", f"{help}, or train with fsdp"
    else:
        return
    yield finding("RUN-LORA-LAYER", _KEY, f"{', '.join(asked)}: adapters for experts {where}", help)


def _linear_layers(actor: ActorConfig, spec: ModelSpec) -> Sequence[str]:
    """Return the names of linear layers; the family's for a model that is not downloaded yet."""
    of_family = tuple(adaptable_layers(spec))
    if spec.counted is not None:
        return of_family
    if spec.experts:
        return (*of_family, *FEED_FORWARD)
    if actor.path is None or not Path(actor.path, "config.json").is_file():
        return of_family
    try:
        return sorted(layer_matrices(Path(actor.path)))
    except ConfigError:  # a finding about the weights has the reason
        return actor.target_modules


def _splits_groups(spec: ModelSpec, plan: Plan) -> bool:
    """Return whether Megatron's TP splits query groups, whose three projections are one matrix there."""
    engine = plan.engine("actor")
    return engine.backend == "megatron" and not spec.latent_attention and engine.sizes.tp > spec.kv_heads


def _on_megatron(actor: ActorConfig, spec: ModelSpec, plan: Plan) -> Iterator[Finding]:
    engine = plan.engine("actor")
    if engine.backend != "megatron":
        return
    if _splits_groups(spec, plan) and any(name in (ALL_LINEAR, *JOINED) for name in actor.target_modules):
        message = (
            f"t{engine.sizes.tp} splits the {spec.kv_heads} query groups, "
            "and adapters of q_proj, k_proj and v_proj with them"
        )
        others = [name for name in adaptable_layers(spec) if name not in JOINED]
        help = f"use t{spec.kv_heads} or less, or write {_KEY}=[{','.join(others)}]"
        yield finding("RUN-LORA-LAYER", _KEY, message, help)
    if actor.megatron.override_transformer_config.get(_FUSED):
        key = f"actor.megatron.override_transformer_config.{_FUSED}"
        yield finding("RUN-LORA-LAYER", key, "fused layers ignore their adapters", f"leave out {_FUSED}")
