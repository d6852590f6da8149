"""The trainer's settings against layout, model and device: settings that Megatron-core rejects or ignores."""

import importlib.util
import os
from collections.abc import Iterator

from allocation.diagnostics import Finding, Severity
from allocation.families import families_with
from allocation.model_spec import ModelSpec
from allocation.plan import ParallelSizes
from areal_like.backends.megatron.options import check_overrides, row_multiple
from areal_like.backends.options import option_finding
from areal_like.backends.training.environment import attention_environment
from areal_like.core.config.findings import finding, warn_ignored
from areal_like.core.config.schema import PRECISIONS, MegatronConfig
from areal_like.core.trainer.packing import sequence_alignment
from areal_like.preflight.view import RoleView

_OVERRIDES = "megatron.override_transformer_config"
_FOR_EXPERTS = ("moe_layer_recompute", "moe_grouped_gemm", "moe_token_dispatcher_type")
# whose experts Megatron Bridge names one by one
_EXPERTS_APART = families_with(lambda family: family.megatron and family.megatron.named_experts)


def check_trainer_options(view: RoleView) -> Iterator[Finding]:
    """Check a role's options that Megatron-core would refuse or ignore."""
    megatron, spec = view.engine.megatron, view.model
    overrides = megatron.override_transformer_config
    for problem in check_overrides(overrides, device=view.device, key=view.key):
        yield option_finding(view.key(_OVERRIDES), problem)
    if view.layout is not None and view.backend != "megatron":
        return  # `check_unused` warns of these keys
    if view.layout is not None:
        yield from _layout(view, view.layout.sizes)
        if view.device == "cuda":
            yield from _context(view, view.layout.sizes)
    if spec is not None and not spec.experts:
        set_ones = (name for name, value in overrides.items() if value is not None)
        no_experts = "the model has no experts"
        yield from (_idle(view, name, no_experts, _OVERRIDES) for name in set_ones if name.startswith("moe_"))
        for name in _FOR_EXPERTS:
            if getattr(megatron, name) != MegatronConfig.model_fields[name].default:
                yield _idle(view, name, no_experts)
    else:
        yield from _experts(view, spec.family if spec else None)
    if megatron.recompute_modules and not megatron.moe_layer_recompute and megatron.recompute_granularity is None:
        yield _idle(view, "recompute_modules", "recompute_granularity is not selective")
    if spec is not None:
        yield from _absent(view, spec)
    yield from _optimizer(view)
    if view.device == "cuda":
        yield from _attention(view)


def _layout(view: RoleView, sizes: ParallelSizes) -> Iterator[Finding]:
    """Check options that depend on the parallel sizes."""
    megatron, limit, sequence = view.engine.megatron, view.engine.mb_spec.max_tokens_per_mb, view.run.longest_sequence
    overrides = megatron.override_transformer_config
    if overrides.get("cp_comm_type") is not None and sizes.cp == 1:
        yield _idle(view, "cp_comm_type", "the trainer's layout has no context parallelism", _OVERRIDES)
    if rows := row_multiple(overrides):
        alignment = sequence_alignment(sizes.tp, sizes.cp, rows)
        longest = -(-sequence // alignment) * alignment
        if longest > limit >= sequence:
            key = view.key("mb_spec.max_tokens_per_mb")
            message = f"FP8 pads a sequence of {sequence} tokens to {longest}, which exceeds {key}={limit}"
            yield finding("RUN-MEGATRON-FP8-LENGTH", key, message, f"write {key}={longest} or more")
    if sizes.dp * sizes.cp == 1:
        for name in ("overlap_grad_reduce", "overlap_param_gather"):
            if getattr(megatron, name):
                yield _idle(view, name, "there is one data-parallel rank")


def _context(view: RoleView, sizes: ParallelSizes) -> Iterator[Finding]:
    """Check how Transformer Engine 2.16 shares a packed sequence (`dot_product_attention/context_parallel.py`): ranks
    send keys and values on, or exchange tokens for heads, so that each has some heads."""
    spec, key = view.model, f"{view.key(_OVERRIDES)}.cp_comm_type"
    given = view.engine.megatron.override_transformer_config.get("cp_comm_type")
    kinds = {str(kind) for kind in (given if isinstance(given, list) else [given or "p2p"])}
    heads = [spec.heads // sizes.tp, max(1, spec.kv_heads // sizes.tp)] if spec else []
    if sizes.cp > 1 and (others := kinds - {"p2p", "a2a"}):
        code = "RUN-MEGATRON-CONTEXT"
        message = f"packed sequences need p2p or a2a; {' and '.join(sorted(others))} does not support them"
    elif "a2a" in kinds and any(number % sizes.cp for number in heads):
        code = "RUN-MEGATRON-CONTEXT"
        message = (
            f"a2a needs heads divisible by c{sizes.cp}; a tensor-parallel rank has {heads[0]}, and {heads[1]} key heads"
        )
    else:
        return
    yield finding(code, key, message, f"write {key}=p2p")


def _experts(view: RoleView, family: str | None) -> Iterator[Finding]:
    """Check the dispatcher (the flexible one is DeepEP's) and ungrouped experts, whose names few bridges know."""
    megatron, bridge = view.engine.megatron, view.key("megatron.bridge_type")
    dispatcher, grouped = view.key("megatron.moe_token_dispatcher_type"), view.key("megatron.moe_grouped_gemm")
    backend = megatron.override_transformer_config.get("moe_flex_dispatcher_backend")
    if megatron.moe_token_dispatcher_type == "flex" and importlib.util.find_spec("deep_ep") is None:
        message = f"the flex dispatcher needs {backend or 'DeepEP'}, and the package deep_ep is not installed"
        yield finding("RUN-PACKAGE", dispatcher, message, f"write {dispatcher}=alltoall")
    elif backend is not None and megatron.moe_token_dispatcher_type != "flex":
        yield _idle(view, "moe_flex_dispatcher_backend", "moe_token_dispatcher_type is not flex", _OVERRIDES)
    apart, other = family in _EXPERTS_APART, "megatron-bridge"
    if family and not megatron.moe_grouped_gemm and not (apart and megatron.bridge_type == other):
        message = f"{megatron.bridge_type} supports the experts of a {family} only with moe_grouped_gemm=true"
        help = f"write {bridge}={other}, or {grouped}=true" if apart else f"write {grouped}=true"
        yield finding("RUN-MEGATRON-EXPERT-NAMES", grouped, message, help)


def _absent(view: RoleView, spec: ModelSpec) -> Iterator[Finding]:
    """Find modules to recompute that no layer of the model has."""
    megatron = view.engine.megatron
    lacks = {"mlp": spec.experts and not spec.dense_layers, "shared_experts": not spec.shared_ffn}
    lacks |= dict.fromkeys(("moe", "moe_act"), not spec.experts)
    selected = megatron.recompute_modules if megatron.recompute_granularity == "selective" else None
    if names := " and ".join(name for name in selected or () if lacks.get(name)):
        key, message = view.key("megatron.recompute_modules"), f"ignored: no layer of the model has {names}"
        yield finding("RUN-UNUSED", key, message, f"leave out {names}", severity=Severity.WARNING)


def _optimizer(view: RoleView) -> Iterator[Finding]:
    """Check that low-precision optimizer states are turned on where a type of them is set."""
    megatron, key = view.engine.megatron, view.key("megatron.use_precision_aware_optimizer")
    for name in () if megatron.use_precision_aware_optimizer else PRECISIONS:
        if (value := getattr(megatron, name)) != "float32":
            own, message = view.key(f"megatron.{name}"), f"{value} needs use_precision_aware_optimizer=true"
            yield finding("RUN-MEGATRON-PRECISION", own, message, f"write {key}=true, or {own}=float32")


def _attention(view: RoleView) -> Iterator[Finding]:
    """Check that no environment variable contradicts `attention_backend`, which ends a run in Megatron-core."""
    backend = str(view.engine.megatron.override_transformer_config.get("attention_backend", "auto"))
    key = f"{view.key(_OVERRIDES)}.attention_backend"
    for name, right in attention_environment(backend).items():
        mine = view.engine.env_vars.get(name)
        value = mine if mine is not None else os.environ.get(name)
        if value is not None and value != right:
            where = view.key(f"env_vars.{name}") if mine is not None else key
            message = f"{name}={value} conflicts with attention_backend={backend}, which needs {name}={right}"
            help = f"leave {name} out, and choose with {key}"
            yield finding("RUN-MEGATRON-ATTENTION-VARIABLE", where, message, help)


def _idle(view: RoleView, name: str, why: str, section: str = "megatron") -> Finding:
    return warn_ignored(view.key(f"{section}.{name}"), why, f"leave out {name}")
