"""Checks options of SGLang that the configuration sets, against the layout, the model and the device."""

import os
from collections.abc import Iterator

from allocation.diagnostics import Finding, Severity
from allocation.model_spec import ModelSpec
from allocation.plan import Plan
from areal_like.backends.sglang.options import DETERMINISTIC_ATTENTION, check_server_options, is_on
from areal_like.core.config.findings import finding
from areal_like.core.config.schema import OWN_FILES, RunConfig, SGLangConfig, WeightUpdateConfig
from areal_like.core.types import Device
from areal_like.data.processor import SEES_WHOLE_IMAGES
from areal_like.preflight.lora import check_lora
from areal_like.preflight.megatron import option_finding
from areal_like.preflight.served_adapters import check_served_adapters
from areal_like.preflight.served_layout import check_served_family


def check_options(config: RunConfig, device: Device, spec: ModelSpec | None, plan: Plan | None) -> Iterator[Finding]:
    """Check options that SGLang would refuse or ignore, and adapters."""
    yield from check_lora(config, spec, plan)
    yield from check_served_adapters(config, device, spec, plan)
    yield from _download(config.weight_update)
    yield from _server(config.sglang, device)
    if spec is not None:
        yield from check_served_family(device, spec, "actor.path")
    yield from _prefill(config)
    if spec is not None and spec.tower and spec.family.removesuffix("_text") in SEES_WHOLE_IMAGES:
        yield from _chunks(config.sglang)
    if plan is not None:
        yield from _router(config, len(plan.engine("rollout").servers))


def _download(update: WeightUpdateConfig) -> Iterator[Finding]:
    """Check the token with which servers download weights."""
    variable = update.token_variable
    if update.url not in (None, OWN_FILES) and variable is not None and variable not in os.environ:
        message = f"the environment variable {variable} is not set"
        help = f"export {variable} before the start, or write weight_update.token_variable=null"
        yield finding("RUN-UPDATE-TOKEN", "weight_update.token_variable", message, help)


def _server(sglang: SGLangConfig, device: Device) -> Iterator[Finding]:
    attention, key, on_cpu = sglang.attention_backend, "sglang.attention_backend", device == "cpu"
    if on_cpu and attention not in (None, "torch_native"):
        yield finding("RUN-CPU-ATTENTION", key, f"SGLang has no {attention} attention on CPU", nearest=["torch_native"])
    if on_cpu and sglang.deterministic:
        message = "SGLang has no deterministic inference on CPU"
        yield finding("RUN-CPU-DETERMINISTIC", "sglang.deterministic", message, nearest=["false"])
    if not on_cpu and sglang.deterministic and attention not in (None, *DETERMINISTIC_ATTENTION):
        message = f"SGLang's {attention} attention is not deterministic"
        yield finding("RUN-SGLANG-DETERMINISTIC", key, message, nearest=DETERMINISTIC_ATTENTION)
    for problem in check_server_options(sglang.extra_args, device=device):
        yield option_finding("sglang.extra_args", problem)


def _prefill(config: RunConfig) -> Iterator[Finding]:
    """Warn of shared prefills without a cache: the prompt would be prefilled once more for nothing."""
    if config.rollout.prefill_once and is_on(config.sglang.extra_args, "disable_radix_cache"):
        message = "ignored: the servers have no radix cache (sglang.extra_args.disable_radix_cache)"
        help = "write rollout.prefill_once=false"
        yield finding("RUN-UNUSED", "rollout.prefill_once", message, help, severity=Severity.WARNING)


def _chunks(sglang: SGLangConfig) -> Iterator[Finding]:
    """Warn of chunks of prompts that may end within an image, whose tokens attend to later ones."""
    for name in sglang.extra_args:
        if name.replace("-", "_") == "chunked_prefill_size":
            message = (
                "ignored: image tokens of this model attend to later tokens, so servers prefill each prompt in one pass"
            )
            key = f"sglang.extra_args.{name}"
            yield finding("RUN-UNUSED", key, message, f"leave out {key}", severity=Severity.WARNING)


def _router(config: RunConfig, servers: int) -> Iterator[Finding]:
    """Return how many of the servers must remain."""
    if config.rollout.min_servers > servers:
        message = f"the layout has {servers} servers, fewer than rollout.min_servers={config.rollout.min_servers}"
        yield finding("RUN-SGLANG-MIN-SERVERS", "rollout.min_servers", message, nearest=[str(servers)])
