"""Bytes per GPU of every engine in every phase, from the shapes alone.

Static memory follows Megatron-core 0.19: `core/distributed/param_and_grad_buffer.py` (parameters and float32 gradients
in buffers), `core/optimizer/distrib_optimizer.py` (main weights and moments, sharded). What a layer keeps for backward
follows from Transformer Engine's modules (`module/layernorm_linear.py`, `attention/dot_product_attention`), in the
manner of Korthikanti et al., arXiv 2205.05198; Megatron-LM's own estimate is `training/theoretical_memory_usage.py`.
Logits are the trainer's (`areal_like/trainer/logprobs.py`): as they come, and once more as their gradient.
Sizes are those of the pipeline stage that needs most; experts are taken to be equally busy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from allocation.model_spec import ModelSpec
from allocation.parameters import (
    Held,
    Kind,
    held,
    kind,
    kinds,
    layer,
    layers_together,
    stages,
    total_parameters,
    vocabulary,
)
from allocation.plan import EnginePlan, ParallelSizes, Plan
from allocation.resolve import BACKENDS, SERVER
from allocation.settings import ITEMS, MegatronSettings, Workload

# Bytes beside the tensors. CUDA's context, and the libraries' kernels; cuBLAS and cuDNN workspaces, which the allocator
# gives; NCCL's buffers for each communicator with company; what SGLang's CUDA graphs and prefill take.
CONTEXT = 600 << 20
WORKSPACE = 100 << 20
COMMUNICATOR = 100 << 20
GRAPHS = 2 << 30
# Reserved by torch's allocator beyond what is allocated at the peak.
FRAGMENTATION = 0.03
CUDA, NCCL, RESERVE = "CUDA and libraries", "NCCL", "allocator's reserve"
CAPTURED = "CUDA graphs and prefill"
AT_REST = "at rest"
_PER_TOKEN = 128  # labels, rows, log-probs, entropies, advantages and their gradients


@dataclass(frozen=True, slots=True)
class Item:
    """One use of memory."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Phase:
    """What lies on a GPU at the worst moment of a phase."""

    name: str
    items: tuple[Item, ...]

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def largest(self) -> Item:
        return max(self.items, key=lambda item: item.bytes)


@dataclass(frozen=True, slots=True)
class Footprint:
    """The phases of one engine. `stage` is the pipeline stage that needs most. `kv_tokens` are those that a server's KV
    cache has room for, where the GPU's size is known, `kv_token_bytes` what one takes."""

    role: str
    phases: tuple[Phase, ...]
    stage: int = 0
    kv_token_bytes: int = 0
    kv_tokens: int | None = None

    @property
    def is_server(self) -> bool:
        return any(phase.name == "rollout" for phase in self.phases)

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def idle(self) -> int:
        """Bytes that stay while engines on the same GPUs work; a server works all the time."""
        names = (AT_REST, "rollout", "load")
        return next(phase.bytes for name in names for phase in self.phases if phase.name == name)

    @property
    def fixed(self) -> int:
        """Bytes that stay even where an engine gives back what it can, for those that take turns with it."""
        return sum(item.bytes for item in self.peak.items if item.name in (CUDA, NCCL, CAPTURED))

    def phase(self, name: str) -> Phase:
        """Raises `StopIteration` for a phase that the engine does not have."""
        return next(phase for phase in self.phases if phase.name == name)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The footprints of all engines of a plan, for people and programs."""

    title: str
    gpu_bytes: int | None
    footprints: tuple[Footprint, ...]

    def to_json(self) -> dict[str, Any]:
        """Bytes of every item, by engine and phase."""
        engines = {
            one.role: {
                "stage": one.stage,
                "peak": {"phase": one.peak.name, "bytes": one.peak.bytes},
                "phases": {phase.name: {item.name: item.bytes for item in phase.items} for phase in one.phases},
                "kv_tokens": one.kv_tokens,
                "kv_token_bytes": one.kv_token_bytes,
            }
            for one in self.footprints
        }
        return {"allocation": self.title, "gpu_bytes": self.gpu_bytes, "engines": engines}

    def _repr_html_(self) -> str:
        from allocation.views.memory import html

        return html(self)


def estimate(plan: Plan, work: Workload) -> Estimate:
    """What every engine of a plan needs on each of its GPUs."""
    return Estimate(plan.allocation, work.memory.gpu_bytes, footprints(plan, work))


def footprints(plan: Plan, work: Workload) -> tuple[Footprint, ...]:
    """The memory of every engine of a plan."""
    return tuple(footprint(engine, work) for engine in plan.engines)


def footprint(engine: EnginePlan, work: Workload) -> Footprint:
    """The memory of one engine."""
    return footprint_of(engine.role, engine.backend, engine.sizes, work)


def footprint_of(role: str, backend: str, sizes: ParallelSizes, work: Workload) -> Footprint:
    """The memory of an engine that is not placed yet."""
    if BACKENDS[backend].kind == SERVER:
        return _server(role, sizes, work)
    if role != "actor":  # no other role has adapters
        work = replace(work, memory=replace(work.memory, trained=1.0))
    return _fsdp(role, sizes, work) if backend == "fsdp" else trainer(role, sizes, work)


def _forward_only(phases: Iterable[Phase]) -> Iterator[Phase]:
    """What a reference model needs, which has weights and no optimizer."""
    trained = ("gradients", "main weights", "Adam's moments", RESERVE)
    for phase in phases:
        if phase.name in ("load", "log-probs", AT_REST):
            yield Phase(phase.name, tuple(item for item in phase.items if not item.name.startswith(trained)))


def trainer(role: str, sizes: ParallelSizes, work: Workload) -> Footprint:
    """A Megatron trainer: the stage with the highest peak."""
    layers = stages(work.model, sizes, work.megatron)
    trains = role != "ref"
    only = list if trains else _forward_only
    ends = range(sizes.pp) if work.model.dense_layers or work.model.linear_layers else {0, sizes.pp - 1}
    stage_phases = {stage: list(only(_phases(sizes, work, layers[stage], stage, trains))) for stage in sorted(ends)}
    worst = max(stage_phases, key=lambda stage: max(phase.bytes for phase in stage_phases[stage]))
    return Footprint(role, tuple(stage_phases[worst]), worst)


def _phases(sizes: ParallelSizes, work: Workload, layers: Sequence[int], stage: int, trains: bool) -> list[Phase]:
    model, first, last = work.model, stage == 0, stage == sizes.pp - 1
    mine = held(model, sizes, layers, first=first, last=last)
    static = _static(mine, sizes, work)
    beside = [Item(CUDA, CONTEXT + WORKSPACE), Item(NCCL, COMMUNICATOR * _communicators(sizes))]
    tokens = work.tokens // sizes.cp
    kept, unit = _activations(sizes, work, layers, stage, tokens)
    logits = last * tokens * (vocabulary(model, sizes.tp) // model.hidden_size // sizes.tp) * work.memory.item
    inside = max((layer_workspace(model, sizes, of, work) * tokens for of in kinds(model, layers)), default=0)
    table = vocabulary(model, sizes.tp) // sizes.tp * work.memory.item
    head_gradient = table if last else 0
    both_ends = head_gradient if model.tied_embeddings and first else 0
    ends = last * tokens * (_PER_TOKEN + (4 + (sizes.tp > 1)) * work.memory.item * model.hidden_size // sizes.tp)
    # Backward begins at the head, where the logits lie twice, and goes on with the layers, one recomputed unit a time.
    at_head = [Item("logits", logits), Item("their gradient", max(logits, head_gradient)), Item("head", ends)]
    in_layer = [Item("recomputed layers", unit), Item("inside a layer", inside), Item("head's gradient", both_ends)]
    deeper = max(at_head, in_layer, key=lambda items: sum(item.bytes for item in items))
    forward = (
        [Item("logits", logits), Item("logits of the micro-batch before", logits)]
        if logits >= inside
        else [Item("inside a layer", inside)]
    )
    exported = _largest_gathered(model, sizes, work)
    there = partial(_there, static, work.megatron)
    named = {
        "load": _loading(mine, static, sizes, work) if trains else _reading(static[0], sizes, work),
        "log-probs": [*there("weights"), *forward],
        "forward and backward": [*there("weights", "gradients"), Item("activations", kept), *deeper],
        "optimizer step": static,
        "weight update": [*there("weights"), Item("gathered weights", exported), Item("bucket", _bucket(model, work))],
        "save": there("weights", "main", "Adam's"),
        AT_REST: there(),
    }
    return _with_reserve(named, beside)


def _reading(weights: Item, sizes: ParallelSizes, work: Workload) -> list[Item]:
    """The largest weight comes beside those of the model: whole, in parts for the ranks of TP, and as one of the parts
    (mbridge 0.15 `core/bridge.py`, `load_weights`)."""
    largest = _largest(work.model, work)
    return [weights, Item("weight that is read", largest + largest // sizes.tp)]


def _loading(mine: Held, static: Sequence[Item], sizes: ParallelSizes, work: Workload) -> list[Item]:
    """The worst of three moments: weights are read, move to one buffer, and are copied to main weights one by one.

    Megatron-core 0.19 `core/distributed/param_and_grad_buffer.py` (experts that EP spreads have a buffer of their own,
    which comes last) and `core/optimizer/distrib_optimizer.py` (`shard_model_param.clone().float()`).
    """
    weights, gradients, main, _ = static
    item, trained, sharded = work.memory.item, work.memory.trained, work.megatron.use_distributed_optimizer
    last = mine.expert if sizes.ep > 1 and mine.expert else mine.dense + mine.expert
    moved = int(last * item * trained) if sharded else 0
    largest = _largest(work.model, work) // sizes.tp // _shards(sizes, work)
    moments = (
        _reading(weights, sizes, work),
        [weights, gradients, Item("weights before they move", moved)],
        [weights, gradients, main, Item("copy of the largest weight", int(largest * trained) if main.bytes else 0)],
    )
    return max(moments, key=lambda items: sum(item.bytes for item in items))


# What an item is offloaded by, by the first word of its name.
_OFFLOADED_BY = {
    "weights": "param_offload",
    "gradients": "grad_offload",
    "main": "optimizer_offload",
    "Adam's": "optimizer_offload",
}


def _there(static: Sequence[Item], settings: MegatronSettings, *needed: str) -> list[Item]:
    """What is on the GPU in a phase that needs some of it: the rest is too, unless it is offloaded."""
    words = [(item, item.name.partition(" ")[0]) for item in static]
    return [
        item
        for item, word in words
        if word in needed or not (settings.offload or getattr(settings, _OFFLOADED_BY[word]))
    ]


def _with_reserve(named: Mapping[str, Sequence[Item]], beside: Sequence[Item]) -> list[Phase]:
    """Phases with what is needed beside their tensors, and what torch's allocator keeps of the GPU unused."""
    phases = []
    for name, items in named.items():
        reserve = Item(RESERVE, int(FRAGMENTATION * sum(item.bytes for item in items)))
        phases.append(Phase(name, tuple(item for item in (*items, reserve, *beside) if item.bytes)))
    return phases


def _static(mine: Held, sizes: ParallelSizes, work: Workload) -> list[Item]:
    """Weights, gradients, main weights and moments; the distributed optimizer shards the last two.

    Of main weights the precision-aware optimizer keeps 16 bits, which a bfloat16 weight lacks of float32 or which are
    a float16 of its own (`store_param_remainders`, megatron-core 0.19 `core/optimizer/optimizer_config.py`).
    """
    item, trained, sharded = work.memory.item, work.memory.trained, work.megatron.use_distributed_optimizer
    settings = work.megatron
    main, grads, moments = ("float32", 4), "float32", 8
    if settings.use_precision_aware_optimizer:
        main, grads = ("16 bits", 2), settings.main_grads_dtype
        moments = ITEMS[settings.exp_avg_dtype] + ITEMS[settings.exp_avg_sq_dtype]
    copies = settings.num_distributed_optimizer_instances
    owned = -(-mine.dense // _shards(sizes, work)) + -(-mine.expert // (max(1, sizes.edp // copies) if sharded else 1))
    return [
        Item("weights", mine.total * item),
        Item(f"gradients ({grads})", int(mine.total * trained * ITEMS[grads])),
        Item(f"main weights ({main[0]})", int(owned * trained * main[1]) if item < 4 else 0),
        Item("Adam's moments", int(owned * trained * moments)),
    ]


def _shards(sizes: ParallelSizes, work: Workload) -> int:
    """Ranks over which the optimizer of the dense parameters is spread."""
    settings = work.megatron
    copies = settings.num_distributed_optimizer_instances
    return max(1, sizes.dp * sizes.cp // copies) if settings.use_distributed_optimizer else 1


def static_bytes(mine: Held, sizes: ParallelSizes, work: Workload) -> int:
    """Weights, gradients, main weights and moments of a rank: the least that it needs."""
    return sum(item.bytes for item in _static(mine, sizes, work))


def _communicators(sizes: ParallelSizes) -> int:
    """NCCL communicators that move tensors on a rank."""
    s = sizes
    return sum(size > 1 for size in (s.tp, s.cp, s.pp, s.dp * s.cp, s.ep * s.etp, s.edp if s.ep * s.etp > 1 else 1))


def _activations(
    sizes: ParallelSizes, work: Workload, layers: Sequence[int], stage: int, tokens: int
) -> tuple[int, int]:
    """Bytes kept for backward by all micro-batches under way, and by the unit of layers that is computed anew."""
    settings, model = work.megatron, work.model
    size = {of: layer_activations(model, sizes, of, work) * tokens for of in kinds(model, layers)}
    entry = -(-model.hidden_size * work.memory.item // sizes.tp) * tokens
    in_flight, chunks = _in_flight(sizes, work, stage)
    if settings.recompute_granularity != "full" or not layers:
        return sum(size[of] * n for of, n in kinds(model, layers).items()) * in_flight // chunks, 0
    each = [size[kind(model, number)] for number in layers]
    step, per_chunk = settings.recompute_num_layers or 1, max(1, len(layers) // sizes.vpp)
    if settings.recompute_method == "block":
        anew = min(step, per_chunk) * sizes.vpp
        unit, each = max(each), [*[entry] * anew, *each[anew:]]
    else:
        unit = max(sum(each[i : i + step]) for i in range(0, len(each), step))
        each = [entry] * (-(-per_chunk // step) * sizes.vpp)
    return sum(each) * in_flight // chunks, unit


def _in_flight(sizes: ParallelSizes, work: Workload, stage: int) -> tuple[int, int]:
    """Chunks of a stage whose activations wait for their backward at once, and chunks of a micro-batch.

    Megatron-LM `core/pipeline_parallel/schedules.py`: `pp - stage` with one chunk a rank, else
    `(pp - stage - 1) * 2 + (vpp - 1) * pp + 1`; never more than there are.
    """
    pp, vpp = sizes.pp, sizes.vpp
    at_once = pp - stage if vpp == 1 else (pp - stage - 1) * 2 + (vpp - 1) * pp + 1
    return min(at_once, micro_batches(sizes, work) * vpp), vpp


def micro_batches(sizes: ParallelSizes, work: Workload) -> int:
    """Micro-batches of a rank in one optimizer step; many when the batch is not known."""
    batch = work.batch
    if batch is None or batch.max_length is None:
        return 1 << 20
    sequences = max(1, batch.sequences // batch.n_minibatches // sizes.dp)
    if batch.micro_batch is not None:
        return max(1, sequences // batch.micro_batch)
    return max(1, -(-sequences * batch.max_length // work.tokens))


def layer_activations(model: ModelSpec, sizes: ParallelSizes, of: Kind, work: Workload) -> int:
    """Bytes that a layer keeps for backward, for each token of a rank (before tensor parallelism)."""
    item, tp = work.memory.item, sizes.tp
    modules = set(work.megatron.recompute_modules) if work.megatron.recompute_granularity == "selective" else set()
    hidden = model.hidden_size / tp * item  # sequence parallelism is on wherever TP is
    norms = 2 * hidden * (model.norms - ("layernorm" in modules))
    kept = norms + _attention_activations(model, sizes, of, item, modules)
    if not of.experts:
        return int(kept + (0 if "mlp" in modules else 3 * model.ffn * item / tp))
    if "moe" in modules:
        return int(kept)
    return int(kept + _moe_activations(model, sizes, item, modules))


def _attention_activations(model: ModelSpec, sizes: ParallelSizes, of: Kind, item: int, modules: set[str]) -> float:
    """Queries, keys and values as attention takes them, as the norm before it takes them, its output and log-sums."""
    tp = sizes.tp
    sums = 4 * model.heads / tp
    if of.linear:
        keys = model.linear_key_heads * model.linear_key_dim
        return 6 * (keys + model.linear_value_heads * model.linear_value_dim) * item / tp
    if model.latent_attention:
        out, inner = model.heads * model.value_dim, 2 * model.query_width + model.heads * model.qk_nope
        compressed = 2 * (model.q_rank + model.kv_rank) + model.qk_rope
        up = 0 if "mla_up_proj" in modules else inner + 2 * out
        return (compressed + (up + out) / tp) * item + sums
    q = model.heads * model.head_dim / tp
    kv = model.head_dim * max(1, model.kv_heads / tp)
    normed = q + kv if model.qk_norm else 0
    gate = q if model.linear_layers else 0
    return (2 * q + 2 * kv + normed + gate) * item + sums


def _moe_activations(model: ModelSpec, sizes: ParallelSizes, item: int, modules: set[str]) -> float:
    """Router and permutation, the tokens as experts take them, their activations, and the shared experts."""
    local = 1 / sizes.tp
    chosen, h, width = model.experts_per_token, model.hidden_size, model.expert_ffn
    router = model.experts * (3 * 4 + 1 + 2 * 4)  # logits, scores and probabilities; the map; the permutation's map
    activation = 2 if "moe_act" in modules else 3
    experts = chosen * (h * sizes.etp + activation * width) * item
    shared = 0 if "shared_experts" in modules else 3 * model.shared_ffn * item
    return local * (router + experts + shared)


def layer_workspace(model: ModelSpec, sizes: ParallelSizes, of: Kind, work: Workload) -> int:
    """Bytes for each token that backward through a layer needs for a moment: gradients of its widest activations."""
    item, tp = work.memory.item, sizes.tp
    width = 3 * model.ffn / tp
    if of.experts:
        width = model.experts_per_token * (2 * model.hidden_size * sizes.etp + 3 * model.expert_ffn) / tp
    return int((width + 2 * model.hidden_size * (1 + (tp > 1))) * item)


def _largest_gathered(model: ModelSpec, sizes: ParallelSizes, work: Workload) -> int:
    """The largest weight under its Hugging Face name, gathered from all ranks that have a part of it."""
    if max(sizes.tp, sizes.pp, sizes.etp) > 1:
        return 2 * _largest(model, work)
    return 2 * model.hidden_size * model.expert_ffn * work.memory.item if sizes.ep > 1 else 0


def _largest(model: ModelSpec, work: Workload) -> int:
    widest = max(model.vocab_size, model.ffn, model.query_width)
    return model.hidden_size * widest * work.memory.item


def _bucket(model: ModelSpec, work: Workload) -> int:
    """Tensors that are sent at once: no more than there are, and at least one (`areal_like/weights/collective`)."""
    everything = total_parameters(model) * work.memory.item
    return max(min(work.memory.bucket_bytes, everything), _largest(model, work))


def _fsdp(role: str, sizes: ParallelSizes, work: Workload) -> Footprint:
    """FSDP2 with float32 weights in shards, which are gathered in `dtype` a layer at a time (torch fully_shard)."""
    model, item = work.model, work.memory.item
    shards, tokens = sizes.dp * sizes.cp, work.tokens // sizes.cp
    everything, numbers = layers_together(model, range(model.layers)), kinds(model, range(model.layers))
    per_layer = [p.dense_on(sizes.tp, model.kv_heads) + p.experts for p in (layer(model, of) for of in numbers)]
    inside = everything.dense_on(sizes.tp, model.kv_heads) + everything.experts
    tables = (1 if model.tied_embeddings else 2) * vocabulary(model, sizes.tp) // sizes.tp
    owned = -(-(inside + tables + model.hidden_size) // shards)
    trained = work.memory.trained
    frozen = Item(f"weights ({work.memory.dtype} shards)", owned * item if trained < 1 else 0)
    static = [frozen, Item("weights (float32 shards)", int(owned * trained * 4))]
    static += [Item("gradients (float32 shards)", int(owned * trained * 4))]
    static += [Item("Adam's moments", int(owned * trained * 8))]
    gathered = Item("gathered layers", (2 * max(per_layer) + tables) * item)
    if work.memory.offload_params:
        static = []
    full = work.megatron.recompute_granularity == "full" or work.memory.gradient_checkpointing
    one = {of: layer_activations(model, sizes, of, work) * tokens for of in numbers}
    kept = sum(one[of] * n for of, n in numbers.items())
    if full:
        kept = model.hidden_size * item * tokens * model.layers + max(one.values())
    logits = tokens * (vocabulary(model, sizes.tp) // model.hidden_size // sizes.tp) * item
    beside = [Item(CUDA, CONTEXT + WORKSPACE), Item(NCCL, COMMUNICATOR * _communicators(sizes))]
    there = partial(_there, static, MegatronSettings(offload=work.megatron.offload))  # Megatron's own do nothing here
    export = Item("gathered weights", 2 * vocabulary(model) * item)
    named = {
        "load": static[:2],
        "log-probs": [*there("weights"), gathered, Item("logits", logits)],
        "forward and backward": [*there("weights", "gradients"), gathered, Item("activations", kept),
                                 Item("logits", logits), Item("their gradient", logits)],
        "optimizer step": static,
        "weight update": [*there("weights"), export, Item("bucket", _bucket(model, work))],
        "save": there("weights", "Adam's"),
        AT_REST: there(),
    }  # fmt: skip
    only = _forward_only if role == "ref" else list
    return Footprint(role, tuple(only(_with_reserve(named, beside))))


def _server(role: str, sizes: ParallelSizes, work: Workload) -> Footprint:
    """An SGLang or vLLM server: weights, and the rest of its share for the KV cache."""
    model, memory = work.model, work.memory
    weights = server_weights(model, sizes) * memory.item
    per_token = kv_token_bytes(model, sizes, memory.item)
    context = Item(CUDA, CONTEXT + WORKSPACE + COMMUNICATOR * (sizes.tp > 1) + COMMUNICATOR)
    room = None
    cache = 0
    if memory.gpu_bytes is not None:
        cache = max(0, int(memory.gpu_bytes * memory.mem_fraction_static) - weights - context.bytes)
        room = cache // per_token if per_token else 0
    elif work.batch is not None and work.batch.max_length is not None:
        cache = -(-work.batch.sequences // sizes.dp) * work.batch.max_length * per_token
    graphs, kv = Item(CAPTURED, GRAPHS), Item("KV cache", cache)
    named = {
        "load": [Item("weights", weights)],
        "rollout": [Item("weights", weights), kv, graphs],
        "weight update": [Item("weights", weights), kv, graphs, Item("bucket", _bucket(model, work))],
    }
    phases = [Phase(name, tuple(i for i in (*items, context) if i.bytes)) for name, items in named.items()]
    return Footprint(role, tuple(phases), 0, per_token, room)


def server_weights(model: ModelSpec, sizes: ParallelSizes) -> int:
    """Parameters on one GPU of a server; TP splits experts too, whole (EP) or in columns."""
    layers = layers_together(model, range(model.layers))
    tables = (1 if model.tied_embeddings else 2) * vocabulary(model, 64 * sizes.tp) // sizes.tp
    return (layers.dense_on(sizes.tp, model.kv_heads) + layers.experts // sizes.tp) // sizes.pp + tables


def kv_token_bytes(model: ModelSpec, sizes: ParallelSizes, item: int) -> int:
    """Bytes of KV cache that a token takes on one GPU of a server; latent attention keeps one vector on each."""
    layers = (model.layers - len(model.linear_layers)) // sizes.pp
    if model.latent_attention:
        return layers * (model.kv_rank + model.qk_rope) * item
    return layers * 2 * max(1, model.kv_heads // sizes.tp) * model.head_dim * item


def needed(prints: Sequence[Footprint], *, offload: bool) -> int:
    """Bytes that engines need together on a GPU that they share: the worst peak, and what the others leave there.

    With `offload` servers and trainers take turns, while trainers stay together in theirs, as servers do.
    """
    most = 0
    for one in prints:
        others = [other for other in prints if other is not one]
        left = [it.fixed if offload and it.is_server != one.is_server else it.idle for it in others]
        most = max(most, one.peak.bytes + sum(left))
    return most
