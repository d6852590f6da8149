"""The trainer's settings against layout, model and device: what Megatron-core would refuse or would not heed."""

import importlib.util
import os
from collections.abc import Iterator, Mapping
from typing import Any

from allocation import Finding, ParallelSizes, Plan, Severity
from allocation.model_spec import ModelSpec
from areal_like.config.findings import finding, warn_ignored
from areal_like.config.options import OptionProblem
from areal_like.config.schema import PRECISIONS, MegatronConfig, RunConfig
from areal_like.trainer.environment import attention_environment
from areal_like.trainer.megatron.options import check_overrides, row_multiple
from areal_like.trainer.packing import sequence_alignment
from areal_like.types import Device

_MEGATRON = "actor.megatron"
_OVERRIDES = f"{_MEGATRON}.override_transformer_config"
_FOR_EXPERTS = ("moe_layer_recompute", "moe_grouped_gemm", "moe_token_dispatcher_type")
_EXPERTS_APART = ("qwen3_moe",)  # whose experts Megatron Bridge names one by one
_OFFLOADS = ("param_offload", "grad_offload", "optimizer_offload")
_OUTPUTS = ("layernorm", "moe_act")  # are recomputed by a function that asks Transformer Engine
_GRAPHS = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")


def check_trainer_options(
    config: RunConfig, device: Device, spec: ModelSpec | None, plan: Plan | None
) -> Iterator[Finding]:
    """Check options that Megatron-core would refuse or ignore."""
    megatron = config.actor.megatron
    overrides = megatron.override_transformer_config
    for problem in check_overrides(overrides, device=device):
        yield about(_OVERRIDES, problem)
    if plan is not None and plan.engine("actor").backend != "megatron":
        yield from _fsdp(config, device)
        return  # `unused` says that these keys do nothing
    if plan is not None:
        yield from _layout(config, plan.engine("actor").sizes)
        if device == "cuda":
            yield from _context(overrides.get("cp_comm_type"), plan.engine("actor").sizes, spec)
    if spec is not None and not spec.experts:
        set_ones = (name for name, value in overrides.items() if value is not None)
        yield from (_idle(name, "the model has no experts", _OVERRIDES) for name in set_ones if name.startswith("moe_"))
        for name in _FOR_EXPERTS:
            if getattr(megatron, name) != MegatronConfig.model_fields[name].default:
                yield _idle(name, "the model has no experts")
    else:
        yield from _experts(megatron, spec.family if spec else None)
    yield from _check_recomputed(megatron, device)
    if spec is not None:
        yield from _absent(megatron, spec)
    yield from _optimizer(config, device)
    yield from _check_offloaded(config)
    if device == "cuda":
        yield from _attention(config)
        yield from _check_fused(overrides)


def _fsdp(config: RunConfig, device: Device) -> Iterator[Finding]:
    """Packed attention under FSDP is torch's kernel on GPUs, which has no float32."""
    if device == "cuda" and config.actor.dtype == "float32":
        message = "actor.dtype is float32, and the FSDP trainer's attention on GPUs computes in bfloat16 alone"
        yield finding("RUN-FSDP-DTYPE", "actor.dtype", message, "write actor.dtype=bfloat16")


def about(section: str, problem: OptionProblem) -> Finding:
    """A finding about an option that a section passes on."""
    nearest = (*(f"{section}.{name}" for name in problem.names), *problem.values)
    return finding(problem.code, f"{section}.{problem.name}", problem.message, problem.help, nearest=nearest)


def _layout(config: RunConfig, sizes: ParallelSizes) -> Iterator[Finding]:
    """Check options that depend on the parallel sizes."""
    megatron, limit = config.actor.megatron, config.actor.mb_spec.max_tokens_per_mb
    overrides = megatron.override_transformer_config
    if overrides.get("cp_comm_type") is not None and sizes.cp == 1:
        yield _idle("cp_comm_type", "the trainer's layout has no context parallelism", _OVERRIDES)
    if rows := row_multiple(overrides):
        alignment = sequence_alignment(sizes.tp, sizes.cp, rows)
        longest = -(-config.longest_sequence // alignment) * alignment
        if longest > limit >= config.longest_sequence:
            key = "actor.mb_spec.max_tokens_per_mb"
            message = f"for FP8 a sequence of {config.longest_sequence} tokens is padded to {longest}"
            yield finding("RUN-MEGATRON-FP8-LENGTH", key, message, f"write {key}={longest} or more")
    if sizes.dp * sizes.cp == 1:
        for name in ("overlap_grad_reduce", "overlap_param_gather"):
            if getattr(megatron, name):
                yield _idle(name, "there is one data-parallel rank")


def _context(given: Any, sizes: ParallelSizes, spec: ModelSpec | None) -> Iterator[Finding]:
    """Check how Transformer Engine 2.16 shares a packed sequence (`dot_product_attention/context_parallel.py`): ranks
    send keys and values on, or exchange tokens for heads, of which each has some then."""
    kinds = {str(kind) for kind in (given if isinstance(given, list) else [given or "p2p"])}
    heads = [spec.heads // sizes.tp, max(1, spec.kv_heads // sizes.tp)] if spec else []
    if sizes.cp > 1 and (others := kinds - {"p2p", "a2a"}):
        code = "RUN-MEGATRON-CP-COMM"
        message = f"packed sequences are shared by p2p or a2a, not by {' or '.join(sorted(others))}"
    elif "a2a" in kinds and any(number % sizes.cp for number in heads):
        code = "RUN-MEGATRON-CP-HEADS"
        message = f"a2a splits heads over {sizes.cp} ranks; a TP rank has {heads[0]}, and {heads[1]} of keys"
    else:
        return
    yield finding(code, f"{_OVERRIDES}.cp_comm_type", message, f"write {_OVERRIDES}.cp_comm_type=p2p")


def _experts(megatron: MegatronConfig, family: str | None) -> Iterator[Finding]:
    """Megatron-core's flexible dispatcher is DeepEP's; experts one by one have names that few bridges know."""
    key, backend = "moe_token_dispatcher_type", megatron.override_transformer_config.get("moe_flex_dispatcher_backend")
    if megatron.moe_token_dispatcher_type == "flex" and importlib.util.find_spec("deep_ep") is None:
        message = f"the flex dispatcher needs {backend or 'DeepEP'}, and the package deep_ep is not installed"
        yield finding("RUN-PACKAGE", f"{_MEGATRON}.{key}", message, f"write {_MEGATRON}.{key}=alltoall")
    elif backend is not None and megatron.moe_token_dispatcher_type != "flex":
        yield _idle("moe_flex_dispatcher_backend", f"{key} is not flex", _OVERRIDES)
    other, grouped = "megatron-bridge", f"{_MEGATRON}.moe_grouped_gemm"
    apart = family in _EXPERTS_APART
    if family and not megatron.moe_grouped_gemm and not (apart and megatron.bridge_type == other):
        message = f"{megatron.bridge_type} names the weights of a {family}'s experts only where they are grouped"
        help = f"write {_MEGATRON}.bridge_type={other}, or {grouped}=true" if apart else f"write {grouped}=true"
        yield finding("RUN-MEGATRON-EXPERT-NAMES", grouped, message, help)
    if not megatron.moe_grouped_gemm and "moe_act" in (megatron.recompute_modules or ()):
        message = "moe_act is recomputed where experts are computed together only"
        help = f"write {_MEGATRON}.moe_grouped_gemm=true"
        yield finding("RUN-MEGATRON-RECOMPUTE-MOE-ACT", f"{_MEGATRON}.recompute_modules", message, help)


def _check_fused(overrides: Mapping[str, Any]) -> Iterator[Finding]:
    """Megatron-core builds no output layer whose gradient a kernel of Apex would have to add, and Apex is not there."""
    name, kernel = "gradient_accumulation_fusion", "fused_weight_gradient_mlp_cuda"
    if overrides.get(name) and importlib.util.find_spec(kernel) is None:
        message = f"{name} needs Apex's extension {kernel}, which is not installed"
        yield finding("RUN-PACKAGE", f"{_OVERRIDES}.{name}", message, f"write {_OVERRIDES}.{name}=false")


def _check_recomputed(megatron: MegatronConfig, device: Device) -> Iterator[Finding]:
    """Modules are chosen where not everything is recomputed."""
    if megatron.moe_layer_recompute and megatron.recompute_granularity == "full":
        key = f"{_MEGATRON}.moe_layer_recompute"
        message = "full recomputation covers the experts' layers"
        yield finding("RUN-MEGATRON-RECOMPUTE-EXPERTS", key, message, f"write {key}=false")
    if megatron.recompute_modules and megatron.recompute_granularity == "full":
        key = f"{_MEGATRON}.recompute_modules"
        message = "full recomputation covers every module"
        yield finding("RUN-MEGATRON-RECOMPUTE-MODULES", key, message, f"write {key}=null")
    if megatron.recompute_modules and not megatron.moe_layer_recompute and megatron.recompute_granularity is None:
        yield _idle("recompute_modules", "recompute_granularity is not selective")
    if device == "cpu" and (needing := [name for name in _OUTPUTS if name in (megatron.recompute_modules or ())]):
        key, message = f"{_MEGATRON}.recompute_modules", f"{' and '.join(needing)} cannot be recomputed on CPU"
        yield finding("RUN-CPU-RECOMPUTE", key, message, f"write {key}=null, or device=cuda")


def _absent(megatron: MegatronConfig, spec: ModelSpec) -> Iterator[Finding]:
    """Modules to recompute that no layer of the model has."""
    lacks = {"mlp": spec.experts and not spec.dense_layers, "shared_experts": not spec.shared_ffn}
    lacks |= dict.fromkeys(("moe", "moe_act"), not spec.experts)
    selected = megatron.recompute_modules if megatron.recompute_granularity == "selective" else None
    if names := " and ".join(name for name in selected or () if lacks.get(name)):
        key, message = f"{_MEGATRON}.recompute_modules", f"no layer of the model has what {names} recomputes"
        yield finding("RUN-UNUSED", key, message, f"leave out {names}", severity=Severity.WARNING)


def _optimizer(config: RunConfig, device: Device) -> Iterator[Finding]:
    """Check low-precision optimizer states against Transformer Engine's Adam."""
    megatron, key = config.actor.megatron, f"{_MEGATRON}.use_precision_aware_optimizer"
    if megatron.use_precision_aware_optimizer:
        if device == "cpu":
            message = "needs Transformer Engine's Adam, which runs on GPUs"
            yield finding("RUN-MEGATRON-PRECISION-CPU", key, message, f"write {key}=false")
        if not megatron.use_distributed_optimizer:
            message = "needs the distributed optimizer (use_distributed_optimizer)"
            yield finding("RUN-MEGATRON-PRECISION-DISTRIBUTED", key, message, f"write {key}=false")
        if config.actor.dtype != "bfloat16":
            message = "is for weights in bfloat16 (actor.dtype)"
            yield finding("RUN-MEGATRON-PRECISION-WEIGHTS", key, message, f"write {key}=false")
        return
    for name in PRECISIONS:
        if (value := getattr(megatron, name)) != "float32":
            message = f"{value} is for the precision-aware optimizer"
            help = f"write {key}=true, or {_MEGATRON}.{name}=float32"
            yield finding("RUN-MEGATRON-PRECISION-STATE", f"{_MEGATRON}.{name}", message, help)


def _check_offloaded(config: RunConfig) -> Iterator[Finding]:
    """A captured graph has the addresses of what it was captured with."""
    actor = config.actor
    overrides, chosen = actor.megatron.override_transformer_config, [n for n in _OFFLOADS if getattr(actor.megatron, n)]
    graphs = next((name for name in _GRAPHS if overrides.get(name) not in (None, False, "none")), None)
    if graphs and (chosen or actor.offload):
        key = "actor.offload" if actor.offload else f"{_MEGATRON}.{chosen[0]}"
        message = f"what is offloaded comes back elsewhere in memory than CUDA graphs expect it ({graphs})"
        yield finding("RUN-MEGATRON-OFFLOAD-GRAPHS", key, message, f"write {key}=false")


def _attention(config: RunConfig) -> Iterator[Finding]:
    """Megatron-core ends a run in which a variable says something else than `attention_backend`."""
    backend = str(config.actor.megatron.override_transformer_config.get("attention_backend", "auto"))
    for name, right in attention_environment(backend).items():
        mine = config.actor.env_vars.get(name)
        value = mine if mine is not None else os.environ.get(name)
        if value is not None and value != right:
            where = f"actor.env_vars.{name}" if mine is not None else f"{_OVERRIDES}.attention_backend"
            message = f"{name} is {value}, and attention_backend {backend} wants {right}"
            help = f"leave {name} out, and choose with {_OVERRIDES}.attention_backend"
            yield finding("RUN-MEGATRON-ATTENTION-VARIABLE", where, message, help)


def _idle(name: str, why: str, section: str = _MEGATRON) -> Finding:
    return warn_ignored(f"{section}.{name}", why, f"leave out {name}")
