"""Checks of options that SGLang would refuse or ignore, and of adapters."""

from collections.abc import Iterator

from allocation.diagnostics import Finding
from allocation.model_spec import ModelSpec
from allocation.plan import Plan
from areal_like.core.config.findings import check_variable, finding
from areal_like.core.config.schema import OWN_FILES, ActorConfig, EngineConfig, RunConfig
from areal_like.core.rollout.backends import backend_of
from areal_like.core.types import Device
from areal_like.preflight.lora import check_lora
from areal_like.preflight.served_layout import check_served_family


def check_options(config: RunConfig, device: Device, spec: ModelSpec | None, plan: Plan | None) -> Iterator[Finding]:
    """Check options that SGLang would refuse or ignore, and adapters."""
    yield from check_lora(config, spec, plan)
    if config.weight_update.url not in (None, OWN_FILES):
        yield from check_variable("weight_update.token_variable", config.weight_update.token_variable)
    yield from backend_of(config).check(config, device, spec)
    if spec is not None:
        yield from check_served_family(device, spec, "actor.path")
    if plan is not None and config.rollout.min_servers > (servers := len(plan.engine("rollout").servers)):
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
