"""Parameter counts of a model and of each rank, from the shapes of transformers' modeling files.

Counts agree with `transformers` 5.12 (`AutoModelForCausalLM`), without buffers such as DeepSeek's routing bias and
without layers for multi-token prediction, which transformers does not build. The trainer builds such a layer where it
trains it (`prediction_layer`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

from allocation.model_spec import ModelSpec
from allocation.pipeline import pipeline_stages

if TYPE_CHECKING:
    from allocation.plan import ParallelSizes
    from allocation.settings import MegatronSettings


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of parameters by their distribution over ranks.

    `split` exist once per tensor-parallel group, as do `kv` if there are enough heads; `copied` exist on each rank of
    the group, `experts` once per expert and expert-tensor parallel block.
    """

    split: int = 0
    kv: int = 0
    copied: int = 0
    experts: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(
            self.split + other.split, self.kv + other.kv, self.copied + other.copied, self.experts + other.experts
        )

    def __mul__(self, n: int) -> Parameters:
        return Parameters(self.split * n, self.kv * n, self.copied * n, self.experts * n)

    @property
    def total(self) -> int:
        """All of them, each once."""
        return self.split + self.kv + self.copied + self.experts

    def dense_on(self, tp: int, kv_heads: int) -> int:
        """Return parameters on one tensor-parallel rank, without its experts; KV heads are copied where there are
        too few."""
        return -(-self.split // tp) + -(-self.kv // min(tp, kv_heads)) + self.copied


@lru_cache(64)
def total_parameters(model: ModelSpec) -> int:
    """Return all parameters of a model with its vision tower; a tied output layer counts once."""
    if model.counted:
        return model.counted.total
    tables = vocabulary(model) * (1 if model.tied_embeddings else 2)
    tower = model.tower.parameters if model.tower else 0
    return layers_together(model, range(model.layers)).total + tables + model.hidden_size + tower


@lru_cache(64)
def active_parameters(model: ModelSpec) -> int:
    """Return parameters that a token passes through: its experts, all else, and the output layer but not the
    embedding."""
    layers = layers_together(model, range(model.layers))
    chosen = layers.experts * model.experts_per_token // model.experts if model.experts else 0
    return layers.total - layers.experts + chosen + vocabulary(model) + model.hidden_size


def sequence_products(model: ModelSpec, length: float) -> float:
    """Return multiplications of a forward pass over the first tokens of a sequence, without the output layer.

    A token multiplies with each active parameter, and attends to half of the sequence, for scores and for values. In
    layers with a window it attends to at most the window.
    """
    sliding = len(model.sliding_layers)
    full = model.layers - len(model.linear_layers) - sliding
    scores = (full * length + sliding * min(length, 2 * model.window)) * model.query_width
    return length * (active_parameters(model) - vocabulary(model) + scores)


def vocabulary(model: ModelSpec, multiple: int = 1) -> int:
    """Return parameters of an embedding or an output layer with its rows padded to a `multiple`."""
    return -(-model.vocab_size // multiple) * multiple * model.hidden_size


class LayerKind(NamedTuple):
    """The composition of a layer; most models have layers of one or two kinds."""

    linear: bool
    experts: bool


def kind(model: ModelSpec, number: int) -> LayerKind:
    """Return the kind of layer `number`."""
    return LayerKind(number in model.linear_layers, model.experts > 0 and number not in model.dense_layers)


def kinds(model: ModelSpec, layers: Sequence[int]) -> Mapping[LayerKind, int]:
    """Return the number of layers of each kind."""
    if not (model.linear_layers or model.dense_layers):
        return {LayerKind(linear=False, experts=model.experts > 0): len(layers)} if layers else {}
    return Counter(kind(model, number) for number in layers)


@cache
def layer(model: ModelSpec, of: LayerKind) -> Parameters:
    """Return the parameters of a decoder layer; of the largest one where they were counted."""
    if model.counted:
        return Parameters(split=model.counted.largest)
    attention = _linear(model) if of.linear else _latent(model) if model.latent_attention else _attention(model)
    return attention + _feed_forward(model, of) + Parameters(copied=model.norms * model.hidden_size)


def layers_together(model: ModelSpec, layers: Sequence[int]) -> Parameters:
    """Return the parameters of some decoder layers."""
    if model.counted:
        share, experts = len(layers) / model.layers, model.counted.experts
        return Parameters(split=round((model.counted.layers - experts) * share), experts=round(experts * share))
    return sum((layer(model, of) * n for of, n in kinds(model, layers).items()), Parameters())


def prediction_kind(model: ModelSpec) -> LayerKind:
    """Return the kind of the layer for multi-token prediction, which equals the last decoder layer."""
    return kind(model, model.layers - 1)


def prediction_layer(model: ModelSpec) -> Parameters:
    """Return the parameters of the layer for multi-token prediction: a decoder layer, a projection and three norms."""
    h = model.hidden_size
    return layer(model, prediction_kind(model)) + Parameters(split=2 * h * h, copied=3 * h)


def _feed_forward(model: ModelSpec, of: LayerKind) -> Parameters:
    """Return the dense part, or router, experts and shared experts."""
    h = model.hidden_size
    if not of.experts:
        bias = model.mlp_bias * 2 * model.ffn
        return Parameters(split=3 * h * model.ffn + bias, copied=model.mlp_bias * h)
    each = 3 * h * model.expert_ffn + model.expert_bias * (2 * model.expert_ffn + h)
    router = model.experts * (h + model.expert_bias) + model.shared_gate * h
    return Parameters(split=3 * h * model.shared_ffn, copied=router, experts=model.experts * each)


def _attention(model: ModelSpec) -> Parameters:
    h, q, kv = model.hidden_size, model.heads * model.head_dim, model.kv_heads * model.head_dim
    gate = q if model.linear_layers else 0  # Qwen3-Next's full attention has a gate for every query
    norm = {"": 0, "head": 2 * model.head_dim, "full": q + kv}[model.qk_norm]
    sinks = model.heads if model.expert_bias else 0  # gpt-oss
    split = h * (2 * q + gate) + sinks + model.qkv_bias * (q + gate)
    return Parameters(split, 2 * kv * (h + model.qkv_bias), norm + model.output_bias * h)


def _latent(model: ModelSpec) -> Parameters:
    """Return multi-head latent attention; the compressing matrices are on every tensor-parallel rank."""
    h, heads, biased = model.hidden_size, model.heads, model.qkv_bias
    inner = (model.q_rank or h) * model.query_width
    inner += model.kv_rank * heads * (model.qk_nope + model.value_dim) + heads * model.value_dim * h
    copied = (h + biased) * (model.kv_rank + model.qk_rope) + model.kv_rank
    copied += (h + biased + 1) * model.q_rank + model.output_bias * h
    if model.index_heads:
        copied += model.index_heads * (model.q_rank * model.index_dim + h) + model.index_dim * (h + 2)
    return Parameters(split=inner, copied=copied)


def _linear(model: ModelSpec) -> Parameters:
    """Return a gated delta net: queries and keys, values and gates, a convolution, two numbers and two vectors per
    head."""
    h, values = model.hidden_size, model.linear_value_heads
    keys, width = model.linear_key_heads * model.linear_key_dim, values * model.linear_value_dim
    projections = h * (2 * keys + 2 * width + 2 * values) + width * h
    convolution = model.linear_kernel * (2 * keys + width)
    return Parameters(split=projections + convolution + 2 * values, copied=model.linear_value_dim)


@dataclass(frozen=True, slots=True)
class Held:
    """Parameters on one rank: on the dense grid and on the expert grid, which have separate optimizers.

    A vision `tower`, on the dense grid of the first stage, may be frozen.
    """

    dense: int
    expert: int
    tower: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.expert + self.tower


def count_held(
    model: ModelSpec, sizes: ParallelSizes, layers: Sequence[int], *, first: bool, last: bool, predicts: bool = False
) -> Held:
    """Return the parameters on a trainer rank whose pipeline stage has `layers` and, if `first`, the embedding and the
    vision tower, if `last`, the head.

    If it `predicts`, the last stage has the layer for multi-token prediction and an embedding too.
    """
    parts = layers_together(model, layers)
    table = vocabulary(model, sizes.tp) // sizes.tp
    tables = first + (last and not (model.tied_embeddings and first))
    if last and predicts:
        parts += prediction_layer(model)
        tables += not (first or model.tied_embeddings)
    dense = parts.dense_on(sizes.tp, model.kv_heads) + tables * table + last * model.hidden_size
    tower = model.tower.parameters if first and model.tower else 0
    return Held(dense, -(-parts.experts // (sizes.ep * sizes.etp)), tower)


def stages(model: ModelSpec, sizes: ParallelSizes, settings: MegatronSettings) -> list[Sequence[int]]:
    """Return the layers of each pipeline stage, with its virtual stages merged."""
    return [parts[0] if len(parts) == 1 else list(chain(*parts)) for parts in stage_chunks(model, sizes, settings)]


def stage_chunks(model: ModelSpec, sizes: ParallelSizes, settings: MegatronSettings) -> list[list[range]]:
    """Return the layers of each virtual stage of each pipeline stage (Megatron-LM transformer_layer.py)."""
    if (written := settings.pipeline_model_parallel_layout) and (parts := pipeline_stages(written)):
        counts = [part.count("t") for part in parts]
    else:
        per_rank = _layers_of_stages(model, sizes, settings)
        counts = [count // sizes.vpp for _ in range(sizes.vpp) for count in per_rank]
    spans = [range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]
    return [spans[stage :: sizes.pp] for stage in range(sizes.pp)]


def _layers_of_stages(model: ModelSpec, sizes: ParallelSizes, settings: MegatronSettings) -> list[int]:
    """Return equally many layers for each stage, except for a first and a last stage that have their own."""
    ends = settings.num_layers_in_first_pipeline_stage, settings.num_layers_in_last_pipeline_stage
    middle = sizes.pp - sum(end is not None for end in ends)
    even = (model.layers - sum(end or 0 for end in ends)) // max(1, middle)
    per_rank = [even] * sizes.pp
    for stage, end in zip((0, -1), ends, strict=True):
        if end is not None:
            per_rank[stage] = end
    return per_rank


def distinct_stages(model: ModelSpec, chunks: Sequence[Sequence[range]]) -> list[int]:
    """Return the first of all stages with the same content; later ones have fewer micro-batches in flight.

    The content is the layers' kinds, in order, and embedding and head.
    """
    found: dict[object, int] = {}
    for stage, parts in enumerate(chunks):
        content = tuple(_content(model, part) for part in parts)
        found.setdefault((stage == 0, stage == len(chunks) - 1, content), stage)
    return list(found.values())


def _content(model: ModelSpec, layers: Sequence[int]) -> object:
    if not (model.linear_layers or model.dense_layers):
        return len(layers)
    return tuple(kind(model, number) for number in layers)
