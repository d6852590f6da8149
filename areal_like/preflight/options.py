"""Checks options of SGLang that the configuration sets, against the layout, the model and the device."""

from collections.abc import Iterator

from allocation.diagnostics import Finding, Severity
from allocation.model_spec import ModelSpec
from allocation.plan import Plan
from areal_like.config.findings import check_variable, finding
from areal_like.config.schema import OWN_FILES, RunConfig, SGLangConfig
from areal_like.data.processor import SEES_WHOLE_IMAGES
from areal_like.preflight.lora import check_lora
from areal_like.preflight.megatron import option_finding
from areal_like.preflight.served_layout import check_served_family
from areal_like.rollout.sglang.options import DETERMINISTIC_ATTENTION, check_server_options, is_on
from areal_like.types import Device


def check_options(config: RunConfig, device: Device, spec: ModelSpec | None, plan: Plan | None) -> Iterator[Finding]:
    """Check options that SGLang would refuse or ignore, and adapters."""
    yield from check_lora(config, spec, plan)
    if config.weight_update.url not in (None, OWN_FILES):
        yield from check_variable("weight_update.token_variable", config.weight_update.token_variable)
    yield from _server(config.sglang, device)
    if spec is not None:
        yield from check_served_family(device, spec, "actor.path")
    yield from _prefill(config)
    if spec is not None and spec.tower and spec.family.removesuffix("_text") in SEES_WHOLE_IMAGES:
        yield from _chunks(config.sglang)
    if plan is not None:
        yield from _router(config, len(plan.engine("rollout").servers))


def _server(sglang: SGLangConfig, device: Device) -> Iterator[Finding]:
    attention, key = sglang.attention_backend, "sglang.attention_backend"
    if device == "cuda" and sglang.deterministic and attention not in (None, *DETERMINISTIC_ATTENTION):
        message = f"SGLang's {attention} attention is not deterministic"
        yield finding("RUN-SGLANG-OPTION", key, message, nearest=DETERMINISTIC_ATTENTION)
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
