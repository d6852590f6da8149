"""Checks of the section `sglang`: options that SGLang would refuse or ignore."""

from collections.abc import Iterator

from allocation.diagnostics import Finding, Severity
from allocation.model_spec import ModelSpec
from areal_like.backends.options import option_finding
from areal_like.backends.sglang.options import DETERMINISTIC_ATTENTION, check_server_options, is_on
from areal_like.core.config.findings import finding
from areal_like.core.config.schema import RunConfig, SGLangConfig
from areal_like.core.types import Device
from areal_like.data.processor import SEES_WHOLE_IMAGES


def check_section(config: RunConfig, device: Device, model: ModelSpec | None) -> Iterator[Finding]:
    """Check the section."""
    yield from _server(config.sglang, device)
    yield from _prefill(config)
    if model is not None and model.tower and model.family.removesuffix("_text") in SEES_WHOLE_IMAGES:
        yield from _chunks(config.sglang)


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
