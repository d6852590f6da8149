"""The checks of a whole run; checks of its data and algorithm, or each adapter's, are in `policies.py`."""

from collections.abc import Iterator, Sequence

from allocation.diagnostics import Finding
from allocation.model_spec import ModelSpec
from allocation.plan import Plan
from areal_like.capability import Known, check_capabilities, served_forms
from areal_like.core.config.findings import check_variable, finding
from areal_like.core.config.schema import OWN_FILES, ActorConfig, EngineConfig, RunConfig
from areal_like.core.rollout.backends import backend_of
from areal_like.core.types import Device
from areal_like.exclusions import find_excluded
from areal_like.preflight.exclusions import RUN
from areal_like.preflight.host_memory import check_host_memory
from areal_like.preflight.lora import check_lora
from areal_like.preflight.machine import check_machine
from areal_like.preflight.resume import check_resume
from areal_like.preflight.roles import check_roles
from areal_like.preflight.served_layout import check_served_family
from areal_like.preflight.sharing import check_sharing
from areal_like.preflight.teacher import check_teacher
from areal_like.preflight.view import RoleView


def check_options(config: RunConfig, device: Device, spec: ModelSpec | None, plan: Plan | None) -> Iterator[Finding]:
    """Check options that SGLang would refuse or ignore, and adapters."""
    yield from check_lora(config, spec, plan)
    if config.weight_update.url not in (None, OWN_FILES):
        yield from check_variable("weight_update.token_variable", config.weight_update.token_variable)
    yield from backend_of(config).check(config, device, spec)
    if spec is not None:
        yield from check_served_family(device, spec, "actor.path")
    if plan is not None:
        yield from _router(config, len(plan.engine("rollout").servers))


def _router(config: RunConfig, servers: int) -> Iterator[Finding]:
    """Return how many of the servers must remain."""
    if config.rollout.min_servers > servers:
        message = f"the layout has {servers} servers, fewer than rollout.min_servers={config.rollout.min_servers}"
        yield finding("RUN-SGLANG-MIN-SERVERS", "rollout.min_servers", message, nearest=[str(servers)])


_SHARED = {*EngineConfig.model_fields, "init_model", "optimizer", "use_lora", "peft_type", "lora_rank", "lora_alpha"}
_SHARED |= {"target_modules", "ppo_n_minibatches"}  # of all adapters: their settings of `actor` are the other ones


def check_several_adapters(config: RunConfig) -> Iterator[Finding]:
    """Find settings of one adapter that all adapters share."""
    for name, adapter in config.adapters.items():
        for setting in adapter.actor:
            if setting in _SHARED and setting in ActorConfig.model_fields:
                key, message = f"adapters.{name}.actor.{setting}", f"all adapters share actor.{setting}"
                yield finding("RUN-SEVERAL", key, message, f"set `actor.{setting}`, or remove this key")


def run_checks(known: Known, views: Sequence[RoleView]) -> Iterator[Finding]:
    """Check machine, model, layout and options, and run the checks of capabilities."""
    config, device, plan, spec, tokenizer = known.config, known.device, known.plan, known.model, known.tokenizer
    algorithms, trained = list(known.algorithms.values()), [it for own in known.prompts.values() for it in own]
    yield from check_machine(config, device, plan, dry_run=known.dry_run)
    yield from check_several_adapters(config)
    yield from check_teacher(config, algorithms[0], tokenizer, trained, plan)
    yield from check_options(config, device, spec, plan)
    yield from check_roles(views)
    yield from check_sharing(config, device, plan)
    token_bytes = sum(form.token_bytes for form in served_forms(known).values())
    yield from check_host_memory(config, device, plan, known.models, token_bytes)
    yield from check_resume(config, trained, plan, known.steps)
    yield from find_excluded(RUN, known)
    yield from check_capabilities(known)
