"""The search for the best layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import islice

from allocation import efficiency as eff
from allocation.compiler import Context, judge
from allocation.memory import footprint_of, shared_peak
from allocation.memory.megatron import static_bytes
from allocation.parameters import total_parameters
from allocation.pipeline import Ends
from allocation.plan import Cluster, ParallelSizes
from allocation.planner.choice import Choice, Servers, Trainer
from allocation.planner.seconds import largest_stage, server_seconds, training_seconds
from allocation.planner.sizes import server_sizes, trainer_sizes
from allocation.planner.task import FULL, PLAIN, POWERS, SHARE, SHARED_SHARE, Task
from allocation.settings import MegatronSettings

MOST_SPLITS = 64


def plan_layouts(task: Task, most: int = 8) -> list[Choice]:
    """Return the `most` best layouts, each valid by `allocation.check` and within the memory model; [] where none
    fits."""
    best_first = sorted(_candidates(task), key=lambda it: (it.seconds, it.trainer.seconds + it.servers.seconds))
    return list(islice((choice for choice in best_first if _valid(task, choice)), most))


def _valid(task: Task, choice: Choice) -> bool:
    context = Context(task.cluster, task.model, task.work(FULL).batch, choice.trainer.megatron)
    return judge(choice.allocation, context).ok


def _candidates(task: Task) -> Iterator[Choice]:
    """Yield, for every split of the GPUs, the best layouts of both sides, which are independent of each other."""
    total = task.cluster.n_gpus
    update = eff.TRANSFER_START + total_parameters(task.model) * task.item / eff.TRANSFER
    for n in sizes_of_trainer(task.cluster):
        if (servers := best_servers(task, total - n, SHARE)) is None:
            continue
        for trainer, peak in islice(fitting_trainers(task, n), 4):
            seconds = max(trainer.seconds, servers.seconds) + update
            if task.staleness == 0:
                seconds = trainer.seconds + max(servers.seconds, servers.longest) + update
            yield Choice(f"{servers.text}+{trainer.text}", seconds, trainer, servers, update, False, peak)
    in_turns = task.staleness == 0 or total == 1
    if in_turns and (servers := best_servers(task, total, SHARED_SHARE)) is not None:
        for trainer, peak in islice(fitting_trainers(task, total, shared=servers), 4):
            seconds = trainer.seconds + max(servers.seconds, servers.longest) + update
            yield Choice(f"{servers.text}|{trainer.text}", seconds, trainer, servers, update, True, peak)


def sizes_of_trainer(cluster: Cluster) -> list[int]:
    """Return GPU counts for the trainer: every count on a single node, else whole nodes or powers of two below one."""
    total, per_node = cluster.n_gpus, cluster.n_gpus_per_node
    if cluster.n_nodes == 1:
        return list(range(1, total))
    below = [n for n in POWERS if n < per_node]
    step = max(1, cluster.n_nodes // MOST_SPLITS) * per_node
    step //= 2 if step % 2 == 0 and total // step <= 8 else 1
    return sorted({*below, *range(step, total, step), *(total - n for n in below)})


def fitting_trainers(task: Task, n: int, shared: Servers | None = None) -> Iterator[tuple[Trainer, int]]:
    """Yield trainers on `n` GPUs whose memory suffices, with their peak, quickest first."""
    beside = []
    if shared is not None:
        sizes = ParallelSizes(tp=shared.tp, dp=shared.dp)
        beside = [footprint_of("rollout", "sglang", sizes, task.work(FULL, shared.share))]
    every = (Trainer(sizes, with_ends(PLAIN, ends), {}) for sizes, ends in possible_trainers(task, n))
    able = (one for one in every if static_peak(task, one) < task.gpu.memory)
    queue = [(trainer.seconds, i, trainer) for i, trainer in enumerate(_add_seconds(task, one) for one in able)]
    heapify(queue)
    while queue:
        _, i, trainer = heappop(queue)
        own = footprint_of("actor", "megatron", trainer.sizes, task.work(trainer.megatron))
        if (peak := shared_peak([own, *beside], offload=False)) <= task.gpu.memory:
            yield trainer, peak
        elif trainer.megatron.recompute_granularity is None:
            slower = _add_seconds(task, replace(trainer, megatron=with_ends(FULL, trainer.ends)))
            heappush(queue, (slower.seconds, i, slower))


def possible_trainers(task: Task, n: int) -> Iterator[tuple[ParallelSizes, Ends]]:
    """Return sizes on `n` GPUs and the ends of their pipelines, whatever memory they need."""
    most = task.batch.sequences // task.batch.n_minibatches
    every = trainer_sizes(task.model, n, task.cluster.n_gpus_per_node, task.ends)
    return ((sizes, ends) for sizes, ends in every if sizes.dp <= most)


def static_peak(task: Task, trainer: Trainer) -> int:
    """Return bytes of weights, gradients and optimizer on the rank that has most of them."""
    sizes, megatron = trainer.sizes, trainer.megatron
    return static_bytes(largest_stage(task.model, sizes, megatron)[0], sizes, task.work(megatron))


def _add_seconds(task: Task, trainer: Trainer) -> Trainer:
    return replace(trainer, parts=training_seconds(task, trainer.sizes, trainer.megatron))


@lru_cache
def with_ends(settings: MegatronSettings, ends: Ends) -> MegatronSettings:
    """Return the settings with layers of the first and of the last stage."""
    first, last = ends
    return replace(settings, num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last)


def best_servers(task: Task, n: int, share: float) -> Servers | None:
    """Return the quickest servers on `n` GPUs, on one node each where they fit there; None where the weights fit on
    none."""
    for tps in server_sizes(task.model, n, task.cluster.n_gpus_per_node):
        found = [servers for tp in tps if (servers := server_seconds(task, n // tp, tp, share))]
        if found:
            return min(found, key=lambda servers: (servers.seconds, servers.longest))
    return None


def best_on(task: Task, nodes: int) -> Choice | None:
    """Return the best layout on another number of nodes."""
    cluster = Cluster(nodes, task.cluster.n_gpus_per_node)
    return next(iter(plan_layouts(replace(task, cluster=cluster), most=1)), None)


def fewest_nodes(task: Task, most: int = 64) -> int | None:
    """Return a number of nodes on which a layout fits, where none does on the task's: the first of its doublings."""
    nodes = task.cluster.n_nodes * 2
    while nodes <= most and best_on(task, nodes) is None:
        nodes *= 2
    return nodes if nodes <= most else None
