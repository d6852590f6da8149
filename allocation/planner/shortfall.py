"""The side of a run that does not fit on a cluster, and its shortfall."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from heapq import nsmallest

from allocation.hardware import GIB
from allocation.memory import footprint_of
from allocation.plan import ParallelSizes
from allocation.planner.choice import PredictedTrainer
from allocation.planner.search import best_servers, fitting_trainers, possible_trainers, sizes_of_trainer, static_peak
from allocation.planner.sizes import server_sizes
from allocation.planner.task import FULL, SHARE, Task, with_ends

_CLOSEST = 64  # trainers whose activations are counted, too: the ones with the smallest weights and optimizer


def shortfall(task: Task) -> Iterator[str]:
    """Return the memory that each side needs even with the whole cluster, or the GPUs that both need together."""
    room, total = task.gpu.memory, task.cluster.n_gpus
    sides = {"the trainer alone needs": least_trainer(task), "the servers alone need": least_servers(task)}
    for name, least in sides.items():
        if least is None:
            yield f"no sizes of {name.split(' alone')[0]} divide both the model and {total} GPUs"
        elif least[0] > room:
            size = f"{least[0] / GIB:.1f} GiB on each GPU, {(least[0] - room) / GIB:.1f} GiB more than it has"
            yield f"{name} at least {size} ({least[1]})"
    if all(least and least[0] <= room for least in sides.values()):
        trainer, servers = fewest_gpus(task)
        if trainer and servers:
            yield f"the trainer needs at least {trainer} GPUs and the servers {servers}; the cluster has {total}"


def fewest_gpus(task: Task) -> tuple[int | None, int | None]:
    """Return the smallest numbers of GPUs, among the planner's candidates, on which trainer and servers fit."""
    able = [*sizes_of_trainer(task.cluster), task.cluster.n_gpus]
    trainer = next((n for n in able if next(fitting_trainers(task, n), None)), None)
    return trainer, next((n for n in able if best_servers(task, n, SHARE)), None)


def least_trainer(task: Task) -> tuple[int, str] | None:
    """Return the smallest peak of a trainer on all GPUs, with full recomputation and an offloaded optimizer, and its
    layout."""
    least = replace(FULL, optimizer_offload=True)
    tokens = task.micro_batches[0]
    every = [
        PredictedTrainer(sizes, with_ends(least, ends), tokens, {})
        for sizes, ends in possible_trainers(task, task.cluster.n_gpus)
    ]
    peaks = [
        (footprint_of("actor", "megatron", one.sizes, task.work(one.megatron)).peak.bytes, one.text)
        for one in nsmallest(_CLOSEST, every, key=lambda one: static_peak(task, one))
    ]
    return min(peaks, default=None)


def least_servers(task: Task) -> tuple[int, str] | None:
    """Return the smallest GPU that holds a server's weights and its longest sequence, and the server's layout."""
    n, longest = task.cluster.n_gpus, task.longest
    work = task.work(FULL)
    work = replace(work, memory=replace(work.memory, gpu_bytes=None), batch=None)  # without a cache
    found = []
    for tp in (tp for tps in server_sizes(task.model, n, task.cluster.n_gpus_per_node) for tp in tps):
        server = footprint_of("rollout", "sglang", ParallelSizes(tp=tp, dp=n // tp), work)
        weights = server.phase("load").bytes
        beside = server.phase("weight update").bytes - weights
        in_share = (weights + longest * server.kv_token_bytes) / SHARE
        found.append((int(max(in_share, beside / (1 - SHARE))), f"sglang:d{n // tp}t{tp}"))
    return min(found, default=None)
