"""Megatron's data parallelism, optimizer and learning-rate schedule, from the config's names."""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config

from areal_like.backends.megatron.grouped_experts import group_products
from areal_like.core.config import schema
from areal_like.core.trainer.engine import Part

# Losses are summed over tokens: 2**16 would overflow immediately. A skipped step loses a batch, so one lowers the
# scale.
LOSS_SCALE = {"initial_loss_scale": 2.0**8, "loss_scale_window": 100, "hysteresis": 1}
BUCKET_SIZE = 40_000_000  # parameters whose gradients are sent together


def wrap_models(
    models: list[torch.nn.Module], engine: schema.EngineConfig, *, trained: bool, overlap: bool
) -> list[torch.nn.Module]:
    """Wrap the chunks for mixed precision and, if they are trained, for data parallelism with gradient buffers.

    Experts get grouped products where these support them.

    `overlap` is the value for `overlap_grad_reduce: null`: whether gradients are sent while others are computed.
    """
    config = get_model_config(models[0])
    chunks = [model if engine.dtype == "float32" else _in_half(config, model) for model in models]
    megatron = engine.megatron
    overlap = overlap if megatron.overlap_grad_reduce is None else megatron.overlap_grad_reduce
    group_products(chunks, sends_early=trained and overlap)
    if not trained:
        return [chunk.requires_grad_(False) for chunk in chunks]
    if megatron.override_transformer_config.get("gradient_accumulation_fusion"):
        _fuse_gradients(chunks)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=megatron.main_grads_dtype == "float32",
        use_distributed_optimizer=megatron.use_distributed_optimizer,
        overlap_grad_reduce=overlap,
        overlap_param_gather=megatron.overlap_param_gather,
        bucket_size=BUCKET_SIZE if overlap else None,
    )
    return [DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]


def _fuse_gradients(models: list[torch.nn.Module]) -> None:
    """Make Transformer Engine's layers add weight gradients to `main_grad` in the kernel that computes them."""
    for model in models:
        for layer in model.modules():
            if hasattr(layer, "fuse_wgrad_accumulation"):
                layer.fuse_wgrad_accumulation = True


def _in_half(config: Any, model: torch.nn.Module) -> torch.nn.Module:
    """Return Megatron's wrapper without rounded buffers: routers' biases are float32 in checkpoints and servers."""
    before = [(module, dict(module.named_buffers(recurse=False))) for module in model.modules()]
    wrapped = Float16Module(config, model)
    for module, buffers in before:
        for name, buffer in buffers.items():
            setattr(module, name, buffer)
    return wrapped


def sends_early(model: torch.nn.Module) -> bool:
    """Return whether gradients of a wrapped chunk are sent while others are computed."""
    return isinstance(model, DistributedDataParallel) and bool(model.ddp_config.overlap_grad_reduce)


def make_optimizer(
    models: list[torch.nn.Module], engine: schema.EngineConfig, optimizer: schema.OptimizerConfig
) -> MegatronOptimizer:
    """Return Adam over the wrapped chunks, and the hooks of Megatron's schedules.

    Only float16 has a loss scale. The optimizer's own method as `grad_scale_func` would keep the optimizer alive
    forever.
    """
    settings = OptimizerConfig(**optimizer_options(engine, optimizer))
    made = get_megatron_optimizer(settings, models, use_gloo_process_groups=False)
    config = get_model_config(models[0])
    config.finalize_model_grads_func = finalize_model_grads
    if engine.dtype == "float16":
        scale_loss = weakref.WeakMethod(made.scale_loss)
        for model in models:
            get_model_config(model).grad_scale_func = lambda loss: (scale_loss() or _refuse_to_scale)(loss)
    no_sync = [model.no_sync for model in models]
    config.no_sync_func = no_sync if len(models) > 1 else no_sync[0]
    return made


def _refuse_to_scale(loss: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the optimizer whose loss scale is asked for was shut down")


def parts(optimizer: MegatronOptimizer | None) -> list[MegatronOptimizer]:
    """Return the optimizers of dense and expert weights, or the single one of all weights."""
    return getattr(optimizer, "chained_optimizers", [optimizer] if optimizer else [])


def loss_scale(optimizer: MegatronOptimizer) -> dict[str, Any] | None:
    """Return the state of float16's loss scale, None for other data types."""
    scalers = [scaler for part in parts(optimizer) if (scaler := getattr(part, "grad_scaler", None))]
    return scalers[0].state_dict() if scalers else None


def set_loss_scale(optimizer: MegatronOptimizer, state: Mapping[str, Any]) -> None:
    """Restore a state that `loss_scale` returned."""
    for part in parts(optimizer):
        part.grad_scaler.load_state_dict(dict(state))


def optimizer_options(engine: schema.EngineConfig, optimizer: schema.OptimizerConfig) -> dict[str, Any]:
    """Return the fields of Megatron's OptimizerConfig that the trainer sets."""
    megatron = engine.megatron
    return {
        "optimizer": optimizer.type,
        "lr": optimizer.lr,
        "min_lr": optimizer.lr * optimizer.min_lr_ratio,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_eps": optimizer.eps,
        "clip_grad": optimizer.gradient_clipping,
        "bf16": engine.dtype == "bfloat16",
        "fp16": engine.dtype == "float16",
        **LOSS_SCALE,
        "params_dtype": getattr(torch, engine.dtype),
        "use_distributed_optimizer": megatron.use_distributed_optimizer,
        "overlap_param_gather": megatron.overlap_param_gather,
        "use_precision_aware_optimizer": megatron.use_precision_aware_optimizer,
        **{name: getattr(torch, getattr(megatron, name)) for name in schema.PRECISIONS},
    }


def gather_weights(models: list[torch.nn.Module]) -> None:
    """Gather all weights that the last step changed; `overlap_param_gather` would gather them in the next step."""
    for model in models:
        if isinstance(model, DistributedDataParallel) and model.ddp_config.overlap_param_gather:
            model.start_param_sync(force_sync=True)


def step_if_finite(optimizer: MegatronOptimizer) -> float:
    """Update the weights, unless the gradient's norm is inf or nan; return the norm, the same on every rank.

    Megatron checks for infinities only with a loss scaler, which bfloat16 and float32 do not use. This function stops
    its step after it has measured the norm and before it changes weights. With float16 the step ends before the norm is
    measured, and lowers the loss scale.
    """
    measure, norms = optimizer.get_grad_norm, []

    def measure_once() -> float:
        norms.append(measure())
        if not math.isfinite(norms[0]):
            raise FloatingPointError
        return norms[0]

    optimizer.get_grad_norm = measure_once
    with suppress(FloatingPointError):
        optimizer.step()
    del optimizer.get_grad_norm
    _agree_on_loss_scale(optimizer)
    return float(norms[0]) if norms else math.inf


def _agree_on_loss_scale(optimizer: MegatronOptimizer) -> None:
    """Set one scale for dense and expert weights, whose optimizers check only their own gradients for infinities."""
    if len(parts(optimizer)) > 1 and loss_scale(optimizer):
        states = [part.grad_scaler.state_dict() for part in parts(optimizer)]
        order = ("scale", "hysteresis_tracker", "growth_tracker")
        set_loss_scale(optimizer, min(states, key=lambda state: [float(state[name]) for name in order]))


def schedule_steps(section: schema.OptimizerConfig, total_steps: int | None, role: str) -> int:
    """Return the optimizer steps that the learning-rate schedule spans.

    Raises ValueError if the learning rate decays but `total_steps` is unknown, or if warm-up takes all steps.
    """
    if total_steps is None:
        if section.lr_scheduler_type != "constant" or section.warmup_steps_proportion:
            key = "lr_scheduler_type" if section.lr_scheduler_type != "constant" else "warmup_steps_proportion"
            raise ValueError(f"{role}.optimizer.{key} {getattr(section, key)} needs the number of training steps")
        return section.warmup_steps + 1
    if section.warmup_steps >= total_steps:
        raise ValueError(
            f"{role}.optimizer.warmup_steps is {section.warmup_steps}, but the run has only {total_steps} optimizer steps"
        )
    return total_steps


def make_schedule(optimizer: MegatronOptimizer, section: schema.OptimizerConfig, steps: int) -> OptimizerParamScheduler:
    """Return a schedule: warm-up, then constant, linear or cosine over `steps` optimizer steps; step it after each.

    The w steps of the warm-up have 1/(w+1), 2/(w+1), ... of the peak, and step w has the peak. From there on the rates
    equal transformers' `get_scheduler`: the step after the last one would have the final rate.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=section.lr / (section.warmup(steps) + 1),
        max_lr=section.lr,
        min_lr=section.lr * section.min_lr_ratio,
        lr_warmup_steps=section.warmup(steps),
        lr_decay_steps=steps,
        lr_decay_style=section.lr_scheduler_type,
        start_wd=section.weight_decay,
        end_wd=section.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
    )


def tensors(
    models: list[torch.nn.Module], optimizer: MegatronOptimizer | None
) -> Mapping[Part, Callable[[], Iterator[torch.Tensor]]]:
    """Return the tensors of each part of a wrapped chunks' engine; float32 weights belong to the optimizer."""

    def params() -> Iterator[torch.Tensor]:
        return (parameter for model in models for parameter in model.parameters())

    def grads() -> Iterator[torch.Tensor]:
        wrapped = (model for model in models if isinstance(model, DistributedDataParallel))
        return (buffer.grad_data for model in wrapped for buffer in (*model.buffers, *model.expert_parallel_buffers))

    def states() -> Iterator[torch.Tensor]:
        for part in parts(optimizer):
            for group in part.optimizer.param_groups:
                yield from group["params"]
            for state in part.optimizer.state.values():
                yield from filter(torch.is_tensor, state.values())

    return {"params": params, "grads": grads, "optimizer": states}
