"""Checks options of SGLang that the configuration sets, against the layout, the model and the device."""

from collections.abc import Iterator

from allocation.diagnostics import Finding
from allocation.model_spec import ModelSpec
from allocation.plan import Plan
from areal_like.core.config.findings import check_variable, finding
from areal_like.core.config.schema import OWN_FILES, RunConfig
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
    if plan is not None:
        yield from _router(config, len(plan.engine("rollout").servers))


def _router(config: RunConfig, servers: int) -> Iterator[Finding]:
    """Return how many of the servers must remain."""
    if config.rollout.min_servers > servers:
        message = f"the layout has {servers} servers, fewer than rollout.min_servers={config.rollout.min_servers}"
        yield finding("RUN-SGLANG-MIN-SERVERS", "rollout.min_servers", message, nearest=[str(servers)])
