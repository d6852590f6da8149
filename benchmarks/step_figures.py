"""Figures of a training step beside its time: share of the GPU's peak, load of the experts, kernels and idle time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from allocation import ModelSpec
from allocation.hardware import GPUS
from allocation.parameters import active_parameters, vocabulary

FORMULA = (
    "passes * 2 * (body * tokens + output layer * its tokens + sum of length^2 * query width * layers) / seconds / peak"
)
_SHOWN = 12  # kernels of a profile


def share_of_peak(
    model: ModelSpec, lengths: NDArray[np.int32], rows: int, seconds: float, *, passes: int, gpus: int
) -> float | None:
    """Return the share of the GPUs' bfloat16 peak, None on a CPU, by FORMULA.

    `passes` are 3 for training, 1 for log-probs; `rows` are the tokens that need logits. `body` are the parameters that
    a token passes through without the output layer. Causal attention computes half of the scores. Recomputation is not
    counted, so that it lowers the share.
    """
    if (peak := _peak()) is None:
        return None
    head = vocabulary(model)
    body = active_parameters(model) - head
    full = model.layers - len(model.linear_layers) - len(model.sliding_layers)
    own = lengths.astype(np.float64)
    scores = full * (own**2).sum() + len(model.sliding_layers) * (own * np.minimum(own, 2 * model.window)).sum()
    products = body * own.sum() + head * rows + scores * model.query_width
    return round(passes * 2 * products / seconds / peak / gpus, 4)


def _peak() -> float | None:
    """Return the bfloat16 peak of this GPU in FLOP/s."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name().lower()
    return next((gpu.flops for word, gpu in GPUS.items() if word.split("-")[0] in name), None)


def expert_load(models: Iterable[torch.nn.Module], step: Callable[[], object]) -> list[float] | None:
    """Return the tokens of the fullest expert over the mean, by layer, in a forward pass of Megatron's models."""
    from megatron.core.transformer.moe.router import TopKRouter

    loads: dict[int, torch.Tensor] = {}

    def count(router: Any, _: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        chosen = output[1].sum(0).float()
        loads[router.layer_number] = loads.get(router.layer_number, 0) + chosen

    routers = [part for model in models for part in model.modules() if isinstance(part, TopKRouter)]
    hooks = [router.register_forward_hook(count) for router in routers]
    step()
    for hook in hooks:
        hook.remove()
    return [round(float(load.max() / load.mean()), 2) for _, load in sorted(loads.items())] or None


class Event(NamedTuple):
    """An event of the profiler, in ns; `on_device` tells kernels and copies from the host's calls."""

    name: str
    start: int
    end: int
    on_device: bool


def profile(step: Callable[[], object]) -> dict[str, Any]:
    """Return the table of a step by torch's profiler, which slows the host down."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    made = found.profiler.kineto_results.events()
    return table(Event(one.name(), one.start_ns(), one.end_ns(), one.device_type().name == "CUDA") for one in made)


def table(events: Iterable[Event]) -> dict[str, Any]:
    """Return counts of kernels and launches, busy and idle time of the device, and the longest kinds of kernels."""
    every = sorted(events, key=lambda one: one.start)
    of_device = [one for one in every if one.on_device]
    kernels = [one for one in of_device if not one.name.startswith(("Memcpy", "Memset"))]
    launches = [one for one in every if not one.on_device and "LaunchKernel" in one.name]
    busy, reached = 0, 0
    for one in of_device:
        busy += max(0, one.end - max(one.start, reached))
        reached = max(reached, one.end)
    span = max((one.end for one in every), default=0) - min((one.start for one in every), default=0)
    seconds, counts = Counter[str](), Counter(_kind(one.name) for one in kernels)
    for one in kernels:
        seconds[_kind(one.name)] += one.end - one.start
    return {
        "seconds": round(span / 1e9, 4),
        "kernels": len(kernels),
        "launches": len(launches),
        "launching_seconds": round(sum(one.end - one.start for one in launches) / 1e9, 4),
        "copies": len(of_device) - len(kernels),
        "busy_seconds": round(busy / 1e9, 4),
        "idle_share": round(1 - busy / span, 3) if span else None,
        "longest": [[name, counts[name], round(ns / 1e9, 4)] for name, ns in seconds.most_common(_SHOWN)],
    }


def _kind(name: str) -> str:
    """Return a kernel's name without namespaces, template arguments and what follows them."""
    name = name.replace("(anonymous namespace)::", "")
    depths = accumulate((char == "<") - (char == ">") for char in name)
    plain = "".join(char for char, depth in zip(name, depths, strict=True) if depth == 0 and char != ">")
    return plain.removeprefix("void ").partition("(")[0].rpartition("::")[2].strip() or name[:60]
