"""The search for the best layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import islice

from allocation import efficiency as eff
from allocation.compiler import Context, judge
from allocation.memory import Footprint, footprint_of, shared_peak
from allocation.memory.megatron import static_bytes
from allocation.parameters import total_parameters
from allocation.pipeline import Ends
from allocation.plan import Cluster, ParallelSizes
from allocation.planner.choice import Choice, PredictedServers, PredictedTrainer, Sharing
from allocation.planner.seconds import compute_bound, largest_stage, least_seconds, server_seconds, training_seconds
from allocation.planner.sizes import server_sizes, trainer_sizes
from allocation.planner.task import EXPERTS, FULL, PLAIN, POWERS, SHARE, SHARED_SHARE, Task, with_ends
from allocation.rules.memory import TIGHT

MOST_SPLITS = 64
MOST_TRAINERS = 4  # of a split of the GPUs
MOST_SERVERS = 3  # servers that share GPUs with a trainer
_ON_HOST = {kind: replace(kind, optimizer_offload=True) for kind in (PLAIN, EXPERTS, FULL)}


def plan_layouts(task: Task, most: int = 8) -> list[Choice]:
    """Return the `most` best layouts, each valid by `allocation.check` and within the memory model, and once, in the
    quicker of synchronous and asynchronous training; [] where none fits."""
    found: dict[tuple[str, Sharing | None], Choice] = {}
    for choice in _rank(task):
        found.setdefault((choice.allocation, choice.sharing), choice)
        if len(found) == most:
            break
    return list(found.values())


def best_each(task: Task) -> tuple[Choice | None, Choice | None]:
    """Return the best synchronous and the best asynchronous layout."""
    ranked = _rank(replace(task, staleness=max(1, task.staleness)))
    found: dict[bool, Choice] = {}
    for choice in ranked:
        found.setdefault(choice.staleness > 0, choice)
        if len(found) == 2:
            break
    return found.get(False), found.get(True)


def _rank(task: Task) -> Iterator[Choice]:
    """Yield valid layouts, best first, each at most once synchronous and once asynchronous."""
    seen = set()
    for choice in _best_first(task):
        way = (choice.allocation, choice.sharing, choice.staleness > 0)
        if way not in seen and _valid(task, choice):
            yield choice
        seen.add(way)


def _best_first(task: Task) -> Iterator[Choice]:
    """Yield layouts by their seconds; a source is asked for its next layout when no other can have a quicker one."""
    sources = list(_sources(task))
    waiting: list[tuple[float, float, int, Choice | None]]
    waiting = [(seconds, 0.0, number, None) for number, (seconds, _) in enumerate(sources)]
    heapify(waiting)
    while waiting:
        _, _, number, choice = heappop(waiting)
        if choice is not None:
            yield choice
        elif (found := next(sources[number][1], None)) is not None:
            heappush(waiting, (found.seconds, found.trainer.seconds + found.servers.seconds, number, found))
            heappush(waiting, (found.seconds, 0.0, number, None))


def _valid(task: Task, choice: Choice) -> bool:
    context = Context(task.cluster, task.model, task.work(PLAIN).batch, choice.trainer.megatron)
    return judge(choice.allocation, context).ok


def _sources(task: Task) -> Iterator[tuple[float, Iterator[Choice]]]:
    """Yield, for every split of the GPUs and for layouts that share all, the best layouts and a bound of their seconds.

    Both sides of a split are independent of each other. Where a bound on staleness allows asynchronous training, it is
    tried both ways.
    """
    total = task.cluster.n_gpus
    for each in [task, replace(task, staleness=0)] if task.staleness else [task]:
        for n in sizes_of_trainer(task.cluster):
            if servers := best_servers(each, total - n, SHARE):
                training, rollout = compute_bound(each, n), _waits(each, servers)
                bound = max(training, rollout) if each.staleness else training + rollout
                yield bound, layouts_of(each, n, servers, None)
        training = compute_bound(each, total)
        for servers in islice(able_servers(each, total, SHARE), MOST_SERVERS):
            yield training + _waits(each, servers), layouts_of(each, total, servers, "alternate")
        for servers in islice(able_servers(each, total, SHARED_SHARE), MOST_SERVERS):
            if each.staleness == 0 or total == 1:
                yield training + _waits(each, servers), layouts_of(each, total, servers, "resident")


def layouts_of(task: Task, n: int, servers: PredictedServers, sharing: Sharing | None) -> Iterator[Choice]:
    """Yield layouts with a trainer on `n` GPUs, quickest first."""
    beside = servers if sharing else None
    for trainer, peak in islice(fitting_trainers(task, n, beside, sharing), MOST_TRAINERS):
        yield _choice(task, trainer, servers, sharing, peak)


def _waits(task: Task, servers: PredictedServers) -> float:
    """Return the seconds of rollout in a step: asynchronous training hides the longest response."""
    return servers.seconds if task.staleness else max(servers.seconds, servers.longest)


def _choice(
    task: Task, trainer: PredictedTrainer, servers: PredictedServers, sharing: Sharing | None, peak: int
) -> Choice:
    """Return a layout with the time of its step: on GPUs of its own, asynchronous training hides the faster side."""
    update = eff.TRANSFER_START + total_parameters(task.model) * task.item / eff.TRANSFER
    seconds = trainer.seconds + _waits(task, servers) + update
    if sharing is None and task.staleness:
        seconds = max(trainer.seconds, servers.seconds) + update
    elif sharing == "alternate" and task.staleness:  # the cache of unfinished responses moves to the host and back
        seconds += 2 * servers.share * task.gpu.memory / eff.HOST_LINK
    text = f"{servers.text}{'|' if sharing else '+'}{trainer.text}"
    return Choice(text, seconds, trainer, servers, update, sharing, task.staleness, peak)


def sizes_of_trainer(cluster: Cluster) -> list[int]:
    """Return GPU counts for the trainer: every count on a single node, else whole nodes or powers of two below one."""
    total, per_node = cluster.n_gpus, cluster.n_gpus_per_node
    if cluster.n_nodes == 1:
        return list(range(1, total))
    below = [n for n in POWERS if n < per_node]
    step = max(1, cluster.n_nodes // MOST_SPLITS) * per_node
    step //= 2 if step % 2 == 0 and total // step <= 8 else 1
    return sorted({*below, *range(step, total, step), *(total - n for n in below)})


def fitting_trainers(
    task: Task, n: int, servers: PredictedServers | None = None, sharing: Sharing | None = None
) -> Iterator[tuple[PredictedTrainer, int]]:
    """Yield trainers on `n` GPUs whose memory suffices, beside servers that share them, with their peak, quickest
    first."""
    beside = []
    if servers is not None:
        sizes = ParallelSizes(tp=servers.tp, dp=servers.dp)
        beside = [footprint_of("rollout", "sglang", sizes, task.work(PLAIN, servers.share))]
    tokens, turns = task.micro_batches[0], sharing == "alternate"
    every = (PredictedTrainer(sizes, with_ends(PLAIN, ends), tokens, {}) for sizes, ends in possible_trainers(task, n))
    able = (one for one in every if static_peak(task, one) < task.gpu.memory)
    bounds = [(least_seconds(task, one.sizes, one.megatron), i, 0, one) for i, one in enumerate(able)]
    queue: list[tuple[float, int, int, PredictedTrainer]] = bounds
    heapify(queue)
    while queue:
        _, i, peak, trainer = heappop(queue)
        if trainer.parts:
            yield trainer, peak
        elif found := _best_settings(task, trainer, partial(_peak_beside, task, beside, turns), turns):
            heappush(queue, (found[0].seconds, i, found[1], found[0]))


def _peak_beside(task: Task, beside: list[Footprint], turns: bool, one: PredictedTrainer) -> int:
    """Return the bytes that a trainer and the servers beside it need together."""
    own = footprint_of("actor", "megatron", one.sizes, task.work(one.megatron, tokens=one.tokens))
    return shared_peak([own, *beside], offload=turns)


def _best_settings(
    task: Task, trainer: PredictedTrainer, peak_of: Callable[[PredictedTrainer], int], turns: bool
) -> tuple[PredictedTrainer, int] | None:
    """Return the trainer with the quickest recomputation and micro-batches that fit, and its peak.

    Settings that leave a part of the GPU free come before quicker ones that do not. Settings that need too much are not
    computed with more tokens, nor with less that is recomputed or on the host.
    """
    kinds = [PLAIN, EXPERTS, FULL] if task.model.experts else [PLAIN, FULL]
    every = [(kind, host, tokens) for host in (0, 1) for kind in range(len(kinds)) for tokens in task.micro_batches]
    timed = []
    for kind, host, tokens in every:  # each of the three saves memory, or needs more, independently of the others
        megatron = with_ends(_ON_HOST[kinds[kind]] if host else kinds[kind], trainer.ends)
        parts = training_seconds(task, trainer.sizes, megatron, tokens, in_turns=turns)
        one = replace(trainer, megatron=megatron, tokens=tokens, parts=parts)
        timed.append((one.seconds, (-kind, -host, tokens), one))
    fits, least = None, max(timed, key=lambda it: (-it[1][0], -it[1][1], -it[1][2]))
    too_large = [least[1]] if peak_of(least[2]) > task.gpu.memory else []
    for _, needs, one in sorted(timed, key=lambda it: (it[0], *map(abs, it[1]))):
        if any(all(a <= b for a, b in zip(less, needs, strict=True)) for less in too_large):
            continue
        if (peak := peak_of(one)) <= TIGHT * task.gpu.memory:
            return one, peak
        too_large.append(needs)
        if peak <= task.gpu.memory:
            fits = fits or (one, peak)
    return fits


def possible_trainers(task: Task, n: int) -> Iterator[tuple[ParallelSizes, Ends]]:
    """Return sizes on `n` GPUs and the ends of their pipelines, regardless of memory."""
    most = task.batch.sequences // task.batch.n_minibatches
    every = trainer_sizes(task.model, n, task.cluster.n_gpus_per_node, task.ends)
    return ((sizes, ends) for sizes, ends in every if sizes.dp <= most)


def static_peak(task: Task, trainer: PredictedTrainer) -> int:
    """Return bytes of weights, gradients and optimizer on the rank that has most of them."""
    sizes, megatron = trainer.sizes, trainer.megatron
    return static_bytes(largest_stage(task.model, sizes, megatron)[0], sizes, task.work(megatron))


def best_servers(task: Task, n: int, share: float) -> PredictedServers | None:
    """Return the quickest servers on `n` GPUs, on one node each where they fit there; None where the weights fit on
    none."""
    return next(able_servers(task, n, share), None)


def able_servers(task: Task, n: int, share: float) -> Iterator[PredictedServers]:
    """Yield servers on `n` GPUs, quickest first, on one node each where they fit there."""
    for tps in server_sizes(task.model, n, task.cluster.n_gpus_per_node):
        found = [servers for tp in tps if (servers := server_seconds(task, n // tp, tp, share))]
        if found:
            yield from sorted(found, key=lambda servers: (servers.seconds, servers.longest))
            return


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
