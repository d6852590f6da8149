"""Options of SGLang and Megatron-core that the configuration sets, against the layout, the model and the device."""

import importlib.util
from collections.abc import Iterator
from typing import Any

from allocation import Finding, ParallelSizes, Plan, Severity
from allocation.model_spec import ModelSpec
from areal_like.config.findings import finding
from areal_like.config.options import OptionProblem
from areal_like.config.schema import RunConfig, SGLangConfig
from areal_like.preflight.machine import Device
from areal_like.rollout.sglang.options import DETERMINISTIC_ATTENTION, check_server_options, is_on
from areal_like.trainer.megatron.options import check_overrides
from areal_like.trainer.packing import sequence_alignment

_OVERRIDES = "actor.megatron.override_transformer_config"
_FP8_ROWS = 16  # Transformer Engine multiplies in FP8 only where rows are a multiple of this


def check_options(config: RunConfig, device: Device, spec: ModelSpec | None, plan: Plan | None) -> Iterator[Finding]:
    """What SGLang and Megatron-core would refuse, and what they would not heed."""
    yield from _server(config.sglang, device)
    yield from _prefill(config)
    if plan is not None:
        yield from _fleet(config, len(plan.engine("rollout").servers))
    yield from check_trainer_options(config, device, spec, plan)


def check_trainer_options(
    config: RunConfig, device: Device, spec: ModelSpec | None, plan: Plan | None
) -> Iterator[Finding]:
    """What Megatron-core would refuse, and what it would not heed."""
    overrides = config.actor.megatron.override_transformer_config
    for problem in check_overrides(overrides, device=device):
        yield _about("RUN-MEGATRON", _OVERRIDES, problem)
    if plan is not None:
        yield from _layout(overrides, plan.engine("actor").sizes)
    if spec is not None and not spec.experts:
        set_ones = (name for name, value in overrides.items() if value is not None)
        yield from (_unused(name, "the model has no experts") for name in set_ones if name.startswith("moe_"))
    yield from _dispatcher(overrides)


def _server(sglang: SGLangConfig, device: Device) -> Iterator[Finding]:
    attention, key, on_cpu = sglang.attention_backend, "sglang.attention_backend", device == "cpu"
    if on_cpu and attention not in (None, "torch_native"):
        yield finding("RUN-CPU", key, f"SGLang has no {attention} attention on CPU", nearest=["torch_native"])
    if on_cpu and sglang.deterministic:
        message = "SGLang has no deterministic inference on CPU"
        yield finding("RUN-CPU", "sglang.deterministic", message, nearest=["false"])
    if not on_cpu and sglang.deterministic and attention not in (None, *DETERMINISTIC_ATTENTION):
        message = f"SGLang's {attention} attention is not deterministic"
        yield finding("RUN-SGLANG", key, message, nearest=DETERMINISTIC_ATTENTION)
    for problem in check_server_options(sglang.extra_args, device=device):
        yield _about("RUN-SGLANG", "sglang.extra_args", problem)


def _about(code: str, section: str, problem: OptionProblem) -> Finding:
    nearest = (*(f"{section}.{name}" for name in problem.names), *problem.values)
    return finding(code, f"{section}.{problem.name}", problem.message, problem.help, nearest=nearest)


def _prefill(config: RunConfig) -> Iterator[Finding]:
    """A prompt that no cache keeps would be prefilled once more for nothing."""
    if config.rollout.prefill_once and is_on(config.sglang.extra_args, "disable_radix_cache"):
        message = "does nothing but a request per group: the servers have no radix cache (sglang.extra_args)"
        help = "write rollout.prefill_once=false"
        yield finding("RUN-UNUSED", "rollout.prefill_once", message, help, severity=Severity.WARNING)


def _fleet(config: RunConfig, servers: int) -> Iterator[Finding]:
    """How many servers have to be left of those that there are."""
    if config.rollout.min_servers > servers:
        message = f"the layout has {servers} servers, so fewer would be left from the start"
        yield finding("RUN-SGLANG", "rollout.min_servers", message, nearest=[str(servers)])


def _layout(overrides: dict[str, Any], sizes: ParallelSizes) -> Iterator[Finding]:
    """What depends on how a sequence is cut."""
    if overrides.get("cp_comm_type") is not None and sizes.cp == 1:
        yield _unused("cp_comm_type", "the trainer's layout has no context parallelism")
    rows = sequence_alignment(sizes.tp, sizes.cp) // sizes.cp
    if overrides.get("fp8") is not None and rows % _FP8_ROWS:
        message = f"FP8 needs micro-batches of {_FP8_ROWS} rows or a multiple; this layout pads to {rows}"
        yield finding("RUN-MEGATRON", f"{_OVERRIDES}.fp8", message, f"write {_OVERRIDES}.fp8=null")


def _dispatcher(overrides: dict[str, Any]) -> Iterator[Finding]:
    """Megatron-core's flexible dispatcher is DeepEP's."""
    key, backend = "moe_token_dispatcher_type", overrides.get("moe_flex_dispatcher_backend")
    if overrides.get(key) == "flex" and importlib.util.find_spec("deep_ep") is None:
        message = f"the flex dispatcher needs {backend or 'DeepEP'}, and the package deep_ep is not installed"
        yield finding("RUN-PACKAGE", f"{_OVERRIDES}.{key}", message, f"write {_OVERRIDES}.{key}=alltoall")
    elif backend is not None and overrides.get(key) != "flex":
        yield _unused("moe_flex_dispatcher_backend", f"{key} is not flex")


def _unused(name: str, why: str) -> Finding:
    key = f"{_OVERRIDES}.{name}"
    return finding("RUN-UNUSED", key, f"does nothing: {why}", f"leave out {name}", severity=Severity.WARNING)
