"""AdamW with Megatron's conventions, so that a run under FSDP is the run under Megatron."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from areal_like.core.config.schema import OptimizerConfig

# Megatron's (`trainer/megatron/optimizer.py`). A step at a scale that overflows is skipped, and its batch is lost.
LOSS_SCALE = {"init_scale": 2.0**8, "growth_interval": 100}


def make_optimizer(model: torch.nn.Module, section: OptimizerConfig) -> AdamW:
    """Return AdamW without decay of biases and norms (`megatron/core/optimizer/__init__.py`, megatron-core 0.19.2)."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    others = [p for name, p in trained if p.ndim <= 1 or name.endswith("bias")]  # of experts in one matrix, too
    matrices = [p for name, p in trained if not (p.ndim <= 1 or name.endswith("bias"))]
    groups = [{"params": matrices, "weight_decay": section.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return AdamW(groups, lr=section.lr, betas=(section.beta1, section.beta2), eps=section.eps)


def make_schedule(optimizer: AdamW, section: OptimizerConfig, steps: int) -> LambdaLR:
    """Return the rates of `trainer/megatron/optimizer.make_schedule`."""
    warmup, final = section.warmup(steps), section.min_lr_ratio

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        fall = {"constant": 0.0, "linear": done, "cosine": (1 - math.cos(math.pi * done)) / 2}
        return 1 - (1 - final) * fall[section.lr_scheduler_type]

    return LambdaLR(optimizer, share)


def set_rates(schedule: LambdaLR) -> None:
    """Give the optimizer the rates of the schedule's place, which are others where it is over other steps now."""
    for group, rate, share in zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = rate * share(schedule.last_epoch)


def make_scaler(dtype: str, device: torch.device) -> GradScaler:
    """Return the loss scale of float16, which changes nothing for other data types."""
    return GradScaler(device.type, enabled=dtype == "float16", **LOSS_SCALE)


def step_if_finite(optimizer: AdamW, largest_norm: float, scaler: GradScaler) -> float:
    """Clip and update, unless the gradient's norm is inf or nan; returns the norm, the same on every rank."""
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    sharded_alike = _by_mesh(parameters)
    norms = [_total_norm(alike) for alike in sharded_alike]
    whole = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    measured = float(whole)
    if math.isfinite(measured):
        for alike in sharded_alike:
            torch.nn.utils.clip_grads_with_norm_(alike, largest_norm, whole)
        scaler.step(optimizer)
    scaler.update()
    return measured


def _by_mesh(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return parameters by the ranks that share them, as an operation on several takes parameters of one mesh."""
    found: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        found.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(found.values())


def _total_norm(parameters: Iterable[Tensor]) -> Tensor:
    norm: Tensor = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
