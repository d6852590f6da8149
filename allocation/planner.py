"""Layouts of trainer and servers for a model on a cluster, best first, by predicted step time under the memory model.

The step time of asynchronous training is that of its slower side, `max(training, rollout)`, and the weight update; of
synchronous training the sum. Arithmetic, memory traffic and links count with the shares of `efficiency.py`, which says
which of them are measured. Layouts are those that the compiler accepts and whose memory suffices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any

from allocation import efficiency as eff
from allocation.compiler import Context, judge
from allocation.hardware import GPUS, Gpu
from allocation.memory import footprint_of, needed
from allocation.memory.megatron import static_bytes
from allocation.model_spec import ModelSpec
from allocation.parameters import Held, active_parameters, held, layers_together, stages, total_parameters
from allocation.plan import Cluster, ParallelSizes
from allocation.settings import BatchSpec, MegatronSettings, MemorySettings, Workload

PLAIN = MegatronSettings()
FULL = MegatronSettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SHARED_FRACTION = 0.4  # a server's share of a GPU that it has together with a trainer
MOST_SPLITS = 64
_POWERS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Task:
    """What is to be planned. `prompt` and `response` are the longest, in tokens; `staleness` is η, 0 for synchronous.

    `batch.max_tokens_per_mb` are the tokens of a micro-batch, `batch.max_length` prompt and response together.
    """

    model: ModelSpec
    cluster: Cluster
    gpu: Gpu = field(default_factory=lambda: GPUS["h100"])
    batch: BatchSpec = field(default_factory=lambda: BatchSpec(256, 8))
    prompt: int = 1024
    response: int = 8192
    staleness: int = 1
    dtype: str = "bfloat16"

    @property
    def mean_response(self) -> float:
        return self.response * eff.MEAN_OF_LONGEST

    @property
    def item(self) -> int:
        """Bytes of a weight."""
        return MemorySettings(dtype=self.dtype).item

    @property
    def tokens(self) -> float:
        """Tokens that are trained on in a step, prompts included."""
        return self.batch.sequences * (self.prompt * eff.MEAN_OF_LONGEST + self.mean_response)

    @property
    def generated(self) -> float:
        return self.batch.sequences * self.mean_response

    def work(self, megatron: MegatronSettings, share: float = 0.8) -> Workload:
        """The memory model's workload; micro-batches hold at least the longest sequence."""
        longest = self.prompt + self.response
        tokens = max(longest, self.batch.max_tokens_per_mb or 0)
        batch = replace(self.batch, max_length=longest, max_tokens_per_mb=-(-tokens // 64) * 64)
        return Workload(self.model, megatron, MemorySettings(self.gpu.memory, self.dtype, share), batch)


@dataclass(frozen=True)
class Trainer:
    """A trainer's layout with the seconds of a step, by what they go to."""

    sizes: ParallelSizes
    megatron: MegatronSettings
    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def text(self) -> str:
        """The member of an allocation."""
        s = self.sizes
        attn = f"d{s.dp}" + "".join(f"{letter}{n}" for letter, n in (("p", s.pp), ("t", s.tp), ("c", s.cp)) if n > 1)
        return f"megatron:(attn:{attn}|ffn:e{s.ep})" if s.ep > 1 else f"megatron:{attn}"


@dataclass(frozen=True)
class Servers:
    """`dp` servers of `tp` GPUs: seconds to generate a batch together, and of the longest response alone.

    `share` is `sglang.mem_fraction_static`.
    """

    dp: int
    tp: int
    share: float
    concurrency: int
    seconds: float
    longest: float

    @property
    def text(self) -> str:
        return f"sglang:d{self.dp}" + (f"t{self.tp}" if self.tp > 1 else "")


@dataclass(frozen=True)
class Choice:
    """A layout with its predicted step; `peak` are the bytes of its fullest GPU."""

    allocation: str
    seconds: float
    trainer: Trainer
    servers: Servers
    update: float
    shared: bool
    peak: int

    @property
    def bottleneck(self) -> str:
        if self.shared:
            return "both in turn"
        return "rollout" if self.servers.seconds > self.trainer.seconds else "training"

    def to_json(self) -> dict[str, Any]:
        """All that is known of it, seconds and bytes."""
        megatron = self.trainer.megatron
        return {
            "allocation": self.allocation,
            "step_seconds": self.seconds,
            "training_seconds": self.trainer.parts,
            "rollout_seconds": self.servers.seconds,
            "longest_response_seconds": self.servers.longest,
            "weight_update_seconds": self.update,
            "recompute_granularity": megatron.recompute_granularity,
            "sglang.mem_fraction_static": self.servers.share,
            "requests_per_server": self.servers.concurrency,
            "peak_bytes": self.peak,
        }


def plan_layouts(task: Task, most: int = 8) -> list[Choice]:
    """The `most` best layouts, each valid by `allocation.check` and within the memory model; [] where none fits."""
    best_first = sorted(_candidates(task), key=lambda it: (it.seconds, it.trainer.seconds + it.servers.seconds))
    return list(islice((choice for choice in best_first if _valid(task, choice)), most))


def _valid(task: Task, choice: Choice) -> bool:
    context = Context(task.cluster, task.model, task.work(FULL).batch, choice.trainer.megatron)
    return judge(choice.allocation, context).ok


def _candidates(task: Task) -> Iterator[Choice]:
    """For every split of the GPUs the best layouts of both sides, which do not depend on each other."""
    total = task.cluster.n_gpus
    update = eff.TRANSFER_START + total_parameters(task.model) * task.item / eff.TRANSFER
    for n in _splits(task.cluster):
        if (servers := best_servers(task, total - n, 0.8)) is None:
            continue
        for trainer, peak in islice(fitting_trainers(task, n), 4):
            seconds = max(trainer.seconds, servers.seconds) + update
            if task.staleness == 0:
                seconds = trainer.seconds + max(servers.seconds, servers.longest) + update
            yield Choice(f"{servers.text}+{trainer.text}", seconds, trainer, servers, update, False, peak)
    in_turns = task.staleness == 0 or total == 1
    if in_turns and (servers := best_servers(task, total, SHARED_FRACTION)) is not None:
        for trainer, peak in islice(fitting_trainers(task, total, shared=servers), 4):
            seconds = trainer.seconds + max(servers.seconds, servers.longest) + update
            yield Choice(f"{servers.text}|{trainer.text}", seconds, trainer, servers, update, True, peak)


def _splits(cluster: Cluster) -> list[int]:
    """Numbers of GPUs for the trainer: every one on a single node, else whole nodes or powers of two below one."""
    total, per_node = cluster.n_gpus, cluster.n_gpus_per_node
    if cluster.n_nodes == 1:
        return list(range(1, total))
    below = [n for n in _POWERS if n < per_node]
    step = max(1, cluster.n_nodes // MOST_SPLITS) * per_node
    step //= 2 if step % 2 == 0 and total // step <= 8 else 1
    return sorted({*below, *range(step, total, step), *(total - n for n in below)})


def fitting_trainers(task: Task, n: int, shared: Servers | None = None) -> Iterator[tuple[Trainer, int]]:
    """Trainers on `n` GPUs whose memory suffices, with their peak, quickest first."""
    beside = []
    if shared is not None:
        sizes = ParallelSizes(tp=shared.tp, dp=shared.dp)
        beside = [footprint_of("rollout", "sglang", sizes, task.work(FULL, shared.share))]
    works = {megatron: task.work(megatron) for megatron in (PLAIN, FULL)}
    most = task.batch.sequences // task.batch.n_minibatches
    all_sizes = (
        sizes
        for sizes in trainer_sizes(task.model, n, task.cluster.n_gpus_per_node)
        if sizes.dp <= most and static_bytes(_largest_stage(task.model, sizes), sizes, works[PLAIN]) < task.gpu.memory
    )
    queue = [(trainer.seconds, i, trainer) for i, s in enumerate(all_sizes) if (trainer := _trainer(task, s, PLAIN))]
    heapify(queue)
    while queue:
        _, i, trainer = heappop(queue)
        own = footprint_of("actor", "megatron", trainer.sizes, works[trainer.megatron])
        if (peak := needed([own, *beside], offload=False)) <= task.gpu.memory:
            yield trainer, peak
        elif trainer.megatron is PLAIN:
            slower = _trainer(task, trainer.sizes, FULL)
            heappush(queue, (slower.seconds, i, slower))


def _trainer(task: Task, sizes: ParallelSizes, megatron: MegatronSettings) -> Trainer:
    return Trainer(sizes, megatron, training_seconds(task, sizes, megatron))


def trainer_sizes(model: ModelSpec, n: int, per_node: int) -> Iterator[ParallelSizes]:
    """Sizes on `n` GPUs that divide the model; tensor parallelism stays within a node."""
    tps = [t for t in _POWERS if t <= per_node and n % t == 0 and _splits_heads(model, t)]
    for tp in tps:
        for pp in (p for p in range(1, 17) if model.layers % p == 0 and n % (tp * p) == 0):
            for cp in (c for c in _POWERS[:4] if n % (tp * pp * c) == 0):
                if model.linear_layers and model.linear_key_heads % (tp * cp):
                    continue
                world = n // pp
                for ep in (*_POWERS, 128, 256) if model.experts else (1,):
                    if world % ep or model.experts % ep:
                        continue
                    yield ParallelSizes(tp, pp, cp, world // (tp * cp), ep, 1, world // ep)


def _splits_heads(model: ModelSpec, tp: int) -> bool:
    if model.heads % tp or model.ffn % tp or model.shared_ffn % tp:
        return False
    return model.latent_attention or model.kv_heads % tp == 0 or tp % model.kv_heads == 0


def training_seconds(task: Task, sizes: ParallelSizes, megatron: MegatronSettings) -> dict[str, float]:
    """Log-probs, forward, backward and the optimizer's step, by what the time goes to.

    Launching kernels runs beside the GPU's work and counts where it takes longer; experts are launched when the host
    has the numbers of their tokens, so that theirs always counts.
    """
    model, gpu, s = task.model, task.gpu, sizes
    item, h = task.item, model.hidden_size
    local, layers = task.tokens / (s.dp * s.cp), model.layers / s.pp  # tokens and layers of a rank
    again = megatron.recompute_granularity == "full"
    passes = 10 if again else 8  # FLOPs a parameter and token; 2 for log-probs
    width = model.expert_ffn * 2 if model.experts else h
    share = eff.PEAK * (w := min(h, width) / math.sqrt(s.tp)) / (w + eff.HALF)
    flops = task.tokens * _flops_per_token(task) * passes / (s.dp * s.cp * s.tp * s.pp)
    compute = flops / (gpu.flops * share) * eff.IMBALANCE
    count = math.ceil(task.tokens / task.batch.n_minibatches / s.dp / _mb_tokens(task))

    def link(ranks: int) -> float:
        """Bytes a second between ranks that follow each other."""
        return gpu.link * eff.LINK if ranks <= task.cluster.n_gpus_per_node else gpu.network * eff.NETWORK

    hidden = local * h * item * layers
    times = {
        "compute": compute,
        "bubble": compute * (s.pp - 1) / count,
        "tp": 13 * hidden * (s.tp - 1) / s.tp / link(s.tp),  # gathers and scatters: 4 forward, 5 backward, 4 log-probs
        "cp": 4 * local * 2 * model.kv_heads * model.head_dim / s.tp * item * layers * (s.cp - 1) / link(s.tp * s.cp),
        "ep": 6 * hidden / s.tp * model.experts_per_token * (1 - 1 / s.ep) / link(s.ep * s.etp),
        "pp": 3 * local * h * item * (s.pp > 1) / link(task.cluster.n_gpus),
    }
    own = _largest_stage(model, sizes)
    copies = s.dp * s.cp
    reduced = own.dense * (copies - 1) / copies + own.expert * (s.edp - 1) / s.edp
    times["dp"] = reduced * (4 + item) / link(copies * s.tp)
    times = {name: seconds * eff.EXPOSED.get(name, 1.0) for name, seconds in times.items()}
    launches, experts = _launch_seconds(model, sizes)
    launches, experts = ((count + s.pp - 1) * seconds * (4 / 3 if again else 1) for seconds in (launches, experts))
    times["host"] = max(0.0, launches - sum(times.values()) + times["dp"]) + experts
    times["optimizer"] = (own.dense / copies + own.expert / s.edp) * 32 / (gpu.bandwidth * eff.MEMORY)
    return times


def _launch_seconds(model: ModelSpec, s: ParallelSizes) -> tuple[float, float]:
    """Seconds that a host takes for a micro-batch on a rank, log-probs and training: all layers, and their experts."""
    with_experts = (model.layers - len(model.dense_layers) if model.experts else 0) / s.pp
    layer = eff.LAUNCH + eff.LAUNCH_TP * (s.tp > 1) + eff.LAUNCH_CP * (s.cp > 1)
    return model.layers / s.pp * layer, with_experts * (eff.LAUNCH_MOE + eff.LAUNCH_EXPERT * model.experts / s.ep)


def _mb_tokens(task: Task) -> int:
    return max(task.batch.max_tokens_per_mb or 0, task.prompt + task.response)


@lru_cache(64)
def _active(model: ModelSpec) -> int:
    return active_parameters(model)


def _flops_per_token(task: Task) -> float:
    """Per FLOP of a weight (2 a pass): active parameters, and attention over half of a mean sequence."""
    model, mean = task.model, task.tokens / task.batch.sequences
    full = model.layers - len(model.linear_layers)
    return _active(model) + full * model.query_width * mean / 2


@lru_cache(4096)
def _largest_stage(model: ModelSpec, sizes: ParallelSizes) -> Held:
    """Parameters of a rank of the first stage, which has the embedding."""
    return held(model, sizes, stages(model, sizes, MegatronSettings())[0], first=True, last=sizes.pp == 1)


def best_servers(task: Task, n: int, share: float) -> Servers | None:
    """The quickest servers on `n` GPUs; None where the weights fit on none of them."""
    found = []
    for tp in _POWERS:
        if n % tp == 0 and tp <= task.cluster.n_gpus_per_node and _splits_heads(task.model, tp):
            found += [servers for servers in [_servers(task, n // tp, tp, share)] if servers is not None]
    return min(found, key=lambda servers: (servers.seconds, servers.longest), default=None)


def _servers(task: Task, dp: int, tp: int, share: float) -> Servers | None:
    """Decoding is bound by the traffic of weights and KV cache, or by arithmetic when many requests run at once."""
    work, model, gpu = task.work(FULL, share), task.model, task.gpu
    room = footprint_of("rollout", "sglang", ParallelSizes(tp=tp, dp=dp), work)
    longest = task.prompt + task.response
    if (room.kv_tokens or 0) < longest or room.peak.bytes > gpu.memory:
        return None
    mean = (task.prompt + task.mean_response) * 0.75  # a request under way has half of its response
    waiting = task.batch.sequences * (1 + task.staleness) / dp
    together = max(1, min(int((room.kv_tokens or 0) / mean), math.ceil(waiting)))

    parts = layers_together(model, range(model.layers))

    def step(requests: float) -> float:
        chosen = 1 - (1 - model.experts_per_token / model.experts) ** requests if model.experts else 1.0
        weights = (total_parameters(model) - parts.experts * (1 - chosen)) * work.memory.item / tp
        traffic = (weights + requests * mean * room.kv_token_bytes) / (gpu.bandwidth * eff.MEMORY)
        arithmetic = 2 * _active(model) * requests / (tp * gpu.flops * eff.SERVING)
        return max(traffic, arithmetic) + eff.DECODE_STEP + 2 * model.layers * eff.ALL_REDUCE * (tp > 1)

    prefill = task.batch.n_prompts * task.prompt * 2 * _active(model) / (dp * tp * gpu.flops * eff.SERVING)
    seconds = task.generated / (dp * together / step(together)) + prefill
    return Servers(dp, tp, share, together, seconds, task.response * step(max(1.0, together / 4)))


@dataclass(frozen=True)
class Asynchrony:
    """Synchronous and asynchronous training in closed form. `a` and `b` are GPU-seconds of rollout and training.

    On N GPUs the split n = N·a / (a + b) for servers makes both sides equally long, (a + b) / N, which synchronous
    training on shared GPUs takes as well, and beside it waits for the longest response: that tail is all that
    asynchrony can hide.
    """

    a: float
    b: float
    gpus: int
    tail: float
    staleness: float

    @property
    def even(self) -> float:
        """Seconds of a step with the ideal split."""
        return (self.a + self.b) / self.gpus

    @property
    def server_gpus(self) -> float:
        return self.gpus * self.a / (self.a + self.b)


def asynchrony(task: Task, best: Choice) -> Asynchrony:
    """From the best layout: what its two sides would take on all of the GPUs, and its expected staleness.

    A response takes `longest · mean / limit` seconds, so its oldest token is that many steps old when it is complete;
    if rollout is quicker than training, finished groups wait until admission stops them, at η.
    """
    servers, n = best.servers.dp * best.servers.tp, task.cluster.n_gpus
    trainer = best.trainer.sizes.dp * best.trainer.sizes.per_replica
    a, b = best.servers.seconds * servers, best.trainer.seconds * trainer
    tail = max(0.0, best.servers.longest - a / n)
    latency = best.servers.longest * eff.MEAN_OF_LONGEST / best.seconds
    waiting = max(0.0, 1 - best.servers.seconds / best.seconds) * task.staleness
    return Asynchrony(a, b, n, tail, min(float(task.staleness), latency + waiting))


def best_on(task: Task, nodes: int) -> Choice | None:
    """The best layout on another number of nodes."""
    cluster = Cluster(nodes, task.cluster.n_gpus_per_node)
    return next(iter(plan_layouts(replace(task, cluster=cluster), most=1)), None)


def fewest_nodes(task: Task, most: int = 64) -> int | None:
    """A number of nodes on which a layout fits, where none does on the task's: the first of its doublings."""
    nodes = task.cluster.n_nodes * 2
    while nodes <= most and best_on(task, nodes) is None:
        nodes *= 2
    return nodes if nodes <= most else None
