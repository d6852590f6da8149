"""Checks options of SGLang that the configuration sets, against the layout, the model and the device."""

import os
from collections.abc import Iterator

from allocation.diagnostics import Finding
from allocation.model_spec import ModelSpec
from allocation.plan import Plan
from areal_like.config.findings import finding
from areal_like.config.schema import OWN_FILES, RunConfig, WeightUpdateConfig
from areal_like.preflight.lora import check_lora
from areal_like.preflight.served_adapters import check_served_adapters
from areal_like.preflight.served_layout import check_served_family
from areal_like.rollout.backends import backend_of
from areal_like.types import Device


def check_options(config: RunConfig, device: Device, spec: ModelSpec | None, plan: Plan | None) -> Iterator[Finding]:
    """Check options that SGLang would refuse or ignore, and adapters."""
    yield from check_lora(config, spec, plan)
    yield from check_served_adapters(config, device, spec, plan)
    yield from _download(config.weight_update)
    yield from backend_of(config).check(config, device, spec)
    if spec is not None:
        yield from check_served_family(device, spec, "actor.path")
    if plan is not None:
        yield from _router(config, len(plan.engine("rollout").servers))


def _download(update: WeightUpdateConfig) -> Iterator[Finding]:
    """Check the token with which servers download weights."""
    variable = update.token_variable
    if update.url not in (None, OWN_FILES) and variable is not None and variable not in os.environ:
        message = f"the environment variable {variable} is not set"
        help = f"export {variable} before the start, or write weight_update.token_variable=null"
        yield finding("RUN-UPDATE-TOKEN", "weight_update.token_variable", message, help)


def _router(config: RunConfig, servers: int) -> Iterator[Finding]:
    """Return how many of the servers must remain."""
    if config.rollout.min_servers > servers:
        message = f"the layout has {servers} servers, fewer than rollout.min_servers={config.rollout.min_servers}"
        yield finding("RUN-SGLANG-MIN-SERVERS", "rollout.min_servers", message, nearest=[str(servers)])
