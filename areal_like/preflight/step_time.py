"""The predicted time of a Megatron actor's step, and of the quickest micro-batches and recomputation that fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from allocation.hardware import GIB, GPUS, Gpu
from allocation.memory import footprint, shared_peak
from allocation.plan import Cluster, Plan
from allocation.planner.choice import PredictedTrainer
from allocation.planner.seconds import training_seconds
from allocation.planner.task import EXPERTS, FULL, PLAIN, Task
from allocation.rules.memory import TIGHT
from allocation.settings import BatchSpec, MegatronSettings, Workload
from areal_like.core.config.schema import RunConfig
from areal_like.preflight.layout import workloads
from areal_like.preflight.view import Models

_WORTH = 0.9  # the share of the present time below which other settings are printed
_ROOMY = 1.1  # a GPU's bytes over the bytes that its name promises


def describe_step(config: RunConfig, plan: Plan, models: Models, image_share: float = 0.0) -> str | None:
    """Return the predicted step of the actor in words; None for another backend, and where this host has no GPU."""
    actor, works = plan.engine("actor"), workloads(config, models, image_share)
    if actor.backend != "megatron" or not works or (size := works["actor"].memory.gpu_bytes) is None:
        return None
    work, gpu = works["actor"], find_gpu(size)
    task = _make_task(config, work, gpu)
    seconds = _seconds(task, plan, work)
    tokens = config.actor.mb_spec.max_tokens_per_mb
    said = f"a training step takes about {seconds:.2g} s on {gpu.name} with micro-batches of {tokens:,} tokens"
    quicker = sorted(
        (_seconds(task, plan, other), number, other)
        for number, other in enumerate(_others(task, work))
        if _fits(plan, works, other, size)
    )
    if not quicker or quicker[0][0] > _WORTH * seconds:
        return f"{said}; no other micro-batches or recomputation are predicted much quicker"
    found, _, other = quicker[0]
    keys = PredictedTrainer(actor.sizes, other.megatron, other.tokens, {}).keys()
    if not other.megatron.recompute_granularity and work.megatron.recompute_granularity:
        keys["actor.megatron.recompute_granularity"] = "null"
    words = " ".join(f"{key}={_spell(value)}" for key, value in keys.items() if "offload" not in key)
    return f"{said}, and {found:.2g} s with {words}"


def find_gpu(size: int) -> Gpu:
    """Return the known GPU with this memory: the quickest whose data sheet is not far off."""
    near = [gpu for gpu in GPUS.values() if size / _ROOMY <= gpu.memory <= size * _ROOMY]
    return max(near, key=lambda gpu: gpu.flops, default=replace(GPUS["h100"], name=f"a GPU of {size / GIB:.0f} GiB"))


def _make_task(config: RunConfig, work: Workload, gpu: Gpu) -> Task:
    cluster = Cluster(config.cluster.n_nodes, config.cluster.n_gpus_per_node)
    prompt, response = config.train_dataset.max_prompt_length, config.gconfig.max_new_tokens
    batch = replace(work.batch or BatchSpec(1), max_tokens_per_mb=None)
    return Task(work.model, cluster, gpu, batch, prompt, response, dtype=config.actor.dtype)


def _seconds(task: Task, plan: Plan, work: Workload) -> float:
    return sum(training_seconds(task, plan.engine("actor").sizes, work.megatron, work.tokens).values())


def _others(task: Task, work: Workload) -> Iterator[Workload]:
    """Yield the workload with each size of micro-batches and each kind of recomputation."""
    kinds: list[MegatronSettings] = [PLAIN, FULL, *([EXPERTS] if task.model.experts else [])]
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
    for kind in kinds:
        megatron = replace(work.megatron, moe_layer_recompute=False, **{name: getattr(kind, name) for name in names})
        for tokens in task.micro_batches:
            yield replace(work, megatron=megatron, batch=replace(task.batch, max_tokens_per_mb=tokens))


def _fits(plan: Plan, works: Mapping[str, Workload], other: Workload, size: int) -> bool:
    """Return whether the actor with other settings fits beside the engines that share its GPUs."""
    gpus = set(plan.engine("actor").devices)
    engines = [engine for engine in plan.engines if gpus & set(engine.devices) and engine.role in works]
    prints = [footprint(engine, other if engine.role == "actor" else works[engine.role]) for engine in engines]
    return shared_peak(prints, offload=other.memory.offload) <= TIGHT * size


def _spell(value: object) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)
