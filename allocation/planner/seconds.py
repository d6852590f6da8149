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
    sequence_products,
    stage_chunks,
    stages,
    total_parameters,
    vocabulary,
)
from allocation.pipeline import Ends
from allocation.plan import ParallelSizes
from allocation.planner.choice import PredictedServers
from allocation.planner.task import PLAIN, Task, with_ends
from allocation.settings import MegatronSettings

Seconds = dict[str, float]

_RECOMPUTED = 4 / 3  # of the launches of log-probs, forward and backward


def training_seconds(
    task: Task, sizes: ParallelSizes, megatron: MegatronSettings, tokens: int | None = None, *, in_turns: bool = False
) -> Seconds:
    """Return log-probs, forward, backward and the optimizer's step, by cause.

    `tokens` is the size of a micro-batch, by default the smallest to try. With `in_turns` the trainer moves to the GPU
    and back to host memory in each step.
    """
    times = _device_seconds(task, sizes, megatron)
    times |= _offload_seconds(task, sizes, megatron, in_turns=in_turns)
    return _with_micro_batches(task, sizes, megatron, times, tokens or task.micro_batches[0])


def least_seconds(task: Task, sizes: ParallelSizes, megatron: MegatronSettings) -> float:
    """Return the seconds with the best of the micro-batches to try."""
    times = _device_seconds(task, sizes, megatron)
    tried = (_with_micro_batches(task, sizes, megatron, times, tokens) for tokens in task.micro_batches)
    return min(sum(each.values()) for each in tried)


def _device_seconds(task: Task, sizes: ParallelSizes, megatron: MegatronSettings) -> Seconds:
    """Return the GPUs' seconds that do not depend on the size of micro-batches."""
    model, gpu, s = task.model, task.gpu, sizes
    item, h = task.item, model.hidden_size
    own, layers = largest_stage(model, sizes, megatron)
    local = task.tokens / (s.dp * s.cp)  # tokens of a rank
    compute = _compute_seconds(task, megatron, s.tp) / (s.dp * s.cp * s.tp) * layers / model.layers

    def link(ranks: int) -> float:
        """Return bytes a second between ranks that follow each other."""
        return gpu.link * eff.LINK if ranks <= task.cluster.n_gpus_per_node else gpu.network * eff.NETWORK

    hidden = local * h * item * layers
    times = {
        "compute": compute,
        "tp": 13 * hidden * (s.tp - 1) / s.tp / link(s.tp),  # gathers and scatters: 4 forward, 5 backward, 4 log-probs
        "cp": 4 * local * 2 * model.kv_heads * model.head_dim / s.tp * item * layers * (s.cp - 1) / link(s.tp * s.cp),
        "ep": 6 * hidden / s.tp * model.experts_per_token * (1 - 1 / s.ep) / link(s.ep * s.etp),
        "pp": 3 * local * h * item * (s.pp > 1) / link(task.cluster.n_gpus),
    }
    copies = s.dp * s.cp
    reduced = own.dense * (copies - 1) / copies + own.expert * (s.edp - 1) / s.edp
    times["dp"] = reduced * (4 + item) / link(copies * s.tp)
    times = {name: seconds * eff.EXPOSED.get(name, 1.0) for name, seconds in times.items()}
    times["optimizer"] = (own.dense / copies + own.expert / s.edp) * 32 / (gpu.bandwidth * eff.MEMORY)
    return times


def compute_bound(task: Task, n: int) -> float:
    """Return the seconds of the arithmetic alone on `n` GPUs without tensor parallelism, a bound of every layout's."""
    return _compute_seconds(task, PLAIN, 1) / n


def _compute_seconds(task: Task, megatron: MegatronSettings, tp: int) -> float:
    """Return the seconds of a step's arithmetic on one GPU with matrices that are split by `tp`."""
    model = task.model
    passes = 8 + 2 * _recomputed_flops(task, megatron)  # FLOPs a parameter and token; 2 for log-probs
    width = min(model.hidden_size, model.expert_ffn * 2 if model.experts else model.hidden_size) / math.sqrt(tp)
    share = eff.PEAK * width / (width + eff.HALF)
    return task.tokens * _flops_per_token(task) * passes / (task.gpu.flops * share) * eff.IMBALANCE


def _with_micro_batches(
    task: Task, s: ParallelSizes, megatron: MegatronSettings, times: Seconds, tokens: int
) -> Seconds:
    """Add the seconds that depend on the number of micro-batches: the bubble, and the host's launches.

    Launching kernels runs beside the GPU's work and counts where it takes longer; with experts a share of the shorter
    counts, too.
    """
    count = math.ceil(task.tokens / task.batch.n_minibatches / s.dp / tokens)
    bubble = times["compute"] * (s.pp - 1) / count
    host = (count + s.pp - 1) * _launch_seconds(task, s, megatron)
    at_once = sum(times.values()) + bubble - sum(times.get(name, 0.0) for name in ("dp", "optimizer", "offload"))
    waits = eff.WAITS * min(host, at_once) if task.model.experts else 0.0
    return {**times, "bubble": bubble, "host": max(0.0, host - at_once) + waits}


def offloaded_bytes(task: Task, sizes: ParallelSizes, megatron: MegatronSettings) -> tuple[int, int]:
    """Return bytes of a rank's weights, and of its main weights and moments."""
    own = largest_stage(task.model, sizes, megatron)[0]
    owned = own.dense // (sizes.dp * sizes.cp) + own.expert // sizes.edp
    return own.total * task.item, owned * (12 if task.item < 4 else 8)


def _offload_seconds(task: Task, sizes: ParallelSizes, megatron: MegatronSettings, *, in_turns: bool) -> Seconds:
    """Return the seconds of moving weights and optimizer from and to host memory."""
    weights, optimizer = offloaded_bytes(task, sizes, megatron)
    moved = weights * in_turns
    if megatron.optimizer_offload:
        moved += optimizer * task.batch.n_minibatches
    elif in_turns:
        moved += optimizer
    return {"offload": 2 * moved / eff.HOST_LINK} if moved else {}


def _launch_seconds(task: Task, s: ParallelSizes, megatron: MegatronSettings) -> float:
    """Return the launch time of a micro-batch on a rank, in seconds, for log-probs and training."""
    model, layers = task.model, largest_stage(task.model, s, megatron)[1]
    with_experts = layers * (1 - len(model.dense_layers) / model.layers) if model.experts else 0
    grouped = task.gpu.groups_experts and task.dtype == "bfloat16"
    each = eff.LAUNCH_GROUPED if grouped else eff.LAUNCH_MOE + eff.LAUNCH_EXPERT * model.experts / s.ep
    dense = layers * (eff.LAUNCH + eff.LAUNCH_TP * (s.tp > 1) + eff.LAUNCH_CP * (s.cp > 1))
    experts = with_experts * each
    if megatron.recompute_granularity == "full":
        dense *= _RECOMPUTED
    if megatron.recompute_granularity:
        experts *= _RECOMPUTED
    return eff.LAUNCH_BATCH + dense + experts


def _recomputed_flops(task: Task, megatron: MegatronSettings) -> float:
    """Return the share of a token's FLOPs that the backward pass computes again."""
    model = task.model
    if megatron.recompute_granularity != "selective":
        return float(megatron.recompute_granularity == "full")
    with_experts = model.layers - len(model.dense_layers)
    width = model.experts_per_token * model.expert_ffn + model.shared_ffn
    return with_experts * 3 * model.hidden_size * width / _flops_per_token(task)


def _flops_per_token(task: Task) -> float:
    """Return FLOPs per token and pass, divided by 2; only generated tokens need the output layer."""
    model, mean = task.model, task.tokens / task.batch.sequences
    return sequence_products(model, mean) / mean + vocabulary(model) * task.generated / task.tokens


def largest_stage(model: ModelSpec, sizes: ParallelSizes, megatron: MegatronSettings) -> tuple[Held, int]:
    """Return parameters of the rank that has most of them, and layers of the longest stage."""
    ends = megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage
    return _largest_stage(model, sizes, ends)


@lru_cache(4096)
def _largest_stage(model: ModelSpec, sizes: ParallelSizes, ends: Ends) -> tuple[Held, int]:
    megatron = with_ends(PLAIN, ends)
    layers, last = stages(model, sizes, megatron), sizes.pp - 1
    apart = distinct_stages(model, stage_chunks(model, sizes, megatron))
    ranks = (count_held(model, sizes, layers[stage], first=stage == 0, last=stage == last) for stage in apart)
    return max(ranks, key=lambda rank: rank.total), max(map(len, layers))


def server_seconds(task: Task, dp: int, tp: int, share: float) -> PredictedServers | None:
    """Return seconds of `dp` servers of `tp` GPUs, None where the longest sequence does not fit.

    Decoding is bound by the traffic of weights and KV cache, or by arithmetic when many requests run at once.
    """
    work, model, gpu = task.work(PLAIN, share), task.model, task.gpu
    room = footprint_of("rollout", "sglang", sizes := ParallelSizes(tp=tp, dp=dp), work)
    if (room.kv_tokens or 0) < task.longest or room.peak.bytes > gpu.memory:
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
        arithmetic = 2 * active_parameters(model) * requests / (tp * gpu.flops * eff.SERVING)
        return max(traffic, arithmetic) + eff.DECODE_STEP + 2 * model.layers * reduce * (tp > 1)

    prefill = task.batch.n_prompts * task.prompt * 2 * active_parameters(model) / (dp * tp * gpu.flops * eff.SERVING)
    seconds = task.generated / (dp * together / step(together)) + prefill
    return PredictedServers(dp, tp, share, together, seconds, task.response * step(max(1.0, together / 4)))
