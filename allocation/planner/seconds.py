"""Predicted seconds of the trainer's and the servers' parts of a step, with the shares of `efficiency.py`."""

from __future__ import annotations

import math
from functools import lru_cache

from allocation import efficiency as eff
from allocation.memory import footprint_of
from allocation.memory.servers import kv_read_bytes
from allocation.model_spec import ModelSpec
from allocation.parameters import (
    Held,
    active_parameters,
    count_held,
    distinct_stages,
    layers_together,
    stage_chunks,
    stages,
    total_parameters,
)
from allocation.plan import ParallelSizes
from allocation.planner.choice import Servers
from allocation.planner.task import FULL, Task
from allocation.settings import MegatronSettings


def training_seconds(task: Task, sizes: ParallelSizes, megatron: MegatronSettings) -> dict[str, float]:
    """Return log-probs, forward, backward and the optimizer's step, by what the time goes to.

    Launching kernels runs beside the GPU's work and counts where it takes longer; experts are launched when the host
    has the numbers of their tokens, so that theirs always counts.
    """
    model, gpu, s = task.model, task.gpu, sizes
    item, h = task.item, model.hidden_size
    own, layers = largest_stage(model, sizes, megatron)
    local = task.tokens / (s.dp * s.cp)  # tokens of a rank
    again = megatron.recompute_granularity == "full"
    passes = 10 if again else 8  # FLOPs a parameter and token; 2 for log-probs
    width = model.expert_ffn * 2 if model.experts else h
    share = eff.PEAK * (w := min(h, width) / math.sqrt(s.tp)) / (w + eff.HALF)
    flops = task.tokens * _flops_per_token(task) * passes / (s.dp * s.cp * s.tp) * layers / model.layers
    compute = flops / (gpu.flops * share) * eff.IMBALANCE
    count = math.ceil(task.tokens / task.batch.n_minibatches / s.dp / task.mb_tokens)

    def link(ranks: int) -> float:
        """Return bytes a second between ranks that follow each other."""
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
    copies = s.dp * s.cp
    reduced = own.dense * (copies - 1) / copies + own.expert * (s.edp - 1) / s.edp
    times["dp"] = reduced * (4 + item) / link(copies * s.tp)
    times = {name: seconds * eff.EXPOSED.get(name, 1.0) for name, seconds in times.items()}
    launches, experts = _launch_seconds(model, sizes, layers)
    launches, experts = ((count + s.pp - 1) * seconds * (4 / 3 if again else 1) for seconds in (launches, experts))
    times["host"] = max(0.0, launches - sum(times.values()) + times["dp"]) + experts
    times["optimizer"] = (own.dense / copies + own.expert / s.edp) * 32 / (gpu.bandwidth * eff.MEMORY)
    return times


def _launch_seconds(model: ModelSpec, s: ParallelSizes, layers: int) -> tuple[float, float]:
    """Return the launch time of a micro-batch on a rank, in seconds: log-probs and training, all layers and experts."""
    with_experts = layers * (1 - len(model.dense_layers) / model.layers) if model.experts else 0
    layer = eff.LAUNCH + eff.LAUNCH_TP * (s.tp > 1) + eff.LAUNCH_CP * (s.cp > 1)
    return layers * layer, with_experts * (eff.LAUNCH_MOE + eff.LAUNCH_EXPERT * model.experts / s.ep)


@lru_cache(64)
def _active(model: ModelSpec) -> int:
    return active_parameters(model)


def _flops_per_token(task: Task) -> float:
    """Return FLOPs per token and pass, divided by 2: active parameters, and attention over half of a mean sequence."""
    model, mean = task.model, task.tokens / task.batch.sequences
    sliding = len(model.sliding_layers)
    full = model.layers - len(model.linear_layers) - sliding
    return _active(model) + (full * mean / 2 + sliding * min(mean / 2, model.window)) * model.query_width


@lru_cache(4096)
def largest_stage(model: ModelSpec, sizes: ParallelSizes, megatron: MegatronSettings) -> tuple[Held, int]:
    """Return parameters of the rank that has most of them, and layers of the longest stage."""
    layers, last = stages(model, sizes, megatron), sizes.pp - 1
    apart = distinct_stages(model, stage_chunks(model, sizes, megatron))
    ranks = (count_held(model, sizes, layers[stage], first=stage == 0, last=stage == last) for stage in apart)
    return max(ranks, key=lambda rank: rank.total), max(map(len, layers))


def server_seconds(task: Task, dp: int, tp: int, share: float) -> Servers | None:
    """Return seconds of `dp` servers of `tp` GPUs, None where the longest sequence does not fit.

    Decoding is bound by the traffic of weights and KV cache, or by arithmetic when many requests run at once.
    """
    work, model, gpu = task.work(FULL, share), task.model, task.gpu
    room = footprint_of("rollout", "sglang", sizes := ParallelSizes(tp=tp, dp=dp), work)
    longest = task.prompt + task.response
    if (room.kv_tokens or 0) < longest or room.peak.bytes > gpu.memory:
        return None
    mean = (task.prompt + task.mean_response) * 0.75  # a request under way has half of its response
    waiting = task.batch.sequences * (1 + task.staleness) / dp
    together = max(1, min(int((room.kv_tokens or 0) / mean), math.ceil(waiting)))

    parts = layers_together(model, range(model.layers))
    cache = kv_read_bytes(model, sizes, work.memory.item, mean)
    reduce = eff.ALL_REDUCE if tp <= task.cluster.n_gpus_per_node else eff.ALL_REDUCE_NODES

    def step(requests: float) -> float:
        chosen = 1 - (1 - model.experts_per_token / model.experts) ** requests if model.experts else 1.0
        weights = (total_parameters(model) - parts.experts * (1 - chosen)) * work.memory.item / tp
        traffic = (weights + requests * cache) / (gpu.bandwidth * eff.MEMORY)
        arithmetic = 2 * _active(model) * requests / (tp * gpu.flops * eff.SERVING)
        return max(traffic, arithmetic) + eff.DECODE_STEP + 2 * model.layers * reduce * (tp > 1)

    prefill = task.batch.n_prompts * task.prompt * 2 * _active(model) / (dp * tp * gpu.flops * eff.SERVING)
    seconds = task.generated / (dp * together / step(together)) + prefill
    return Servers(dp, tp, share, together, seconds, task.response * step(max(1.0, together / 4)))
