"""Adapters (LoRA) of Megatron's parallel linear layers, one for each Hugging Face module that such a layer joins.

A forward hook adds them to the layer's output, so that both bridges see an unchanged model. With tensor parallelism an
adapter is split like its layer, and ranks exchange tensors of `rank` columns: A is applied before the gather of the
sequence's parts, or B after their scatter, and this matrix is replicated on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch import Tensor

from areal_like.backends.megatron.bridges.protocol import Bridge
from areal_like.backends.training.lora import Adapter, initial_adapter, refuse_unmatched
from areal_like.core.trainer.engine import LoRA


class AdaptedPart(NamedTuple):
    """A Hugging Face module in a layer of Megatron, with its number of `outputs`.

    With `runs` each head has several runs of outputs, such as a query and its gate, of these sizes. The module has all
    runs of the first head, then the next head's; with `by_run` the first run of all heads, then their second.
    """

    outputs: int
    runs: tuple[int, ...] = ()
    by_run: bool = False


class Joined(NamedTuple):
    """A linear layer of Megatron: its place in a decoder layer, and the modules that it joins, by name.

    The modules' outputs alternate in `blocks` on a rank: a query group's queries, keys and values, then the next
    group's. Inside a block Megatron has the first run of all heads, then their second. Tensor parallelism splits
    `outputs` or `inputs`, or nothing: then each rank computes its part of the sequence.
    """

    place: str
    inputs: int
    parts: dict[str, AdaptedPart]
    splits: str = "outputs"
    blocks: int = 1


def joined_layers(config: Any, family: str) -> Iterator[Joined]:
    """Yield the linear layers of decoder layers without experts, sizes over all ranks but for `blocks`."""
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    yield from _latent(config) if config.multi_latent_attention else _attention(config)
    if config.experimental_attention_variant == "gated_delta_net":
        yield from _delta_net(config, family)
    yield Joined("mlp.linear_fc1", hidden, {"mlp.gate_proj": AdaptedPart(ffn), "mlp.up_proj": AdaptedPart(ffn)})
    yield Joined("mlp.linear_fc2", ffn, {"mlp.down_proj": AdaptedPart(hidden)}, "inputs")


def _attention(config: Any) -> Iterator[Joined]:
    hidden, width = config.hidden_size, config.kv_channels
    queries, keys = config.num_attention_heads * width, config.num_query_groups * width
    gated = AdaptedPart(2 * queries, (width, width)) if config.attention_output_gate else AdaptedPart(queries)
    parts = {"self_attn.q_proj": gated, "self_attn.k_proj": AdaptedPart(keys), "self_attn.v_proj": AdaptedPart(keys)}
    blocks = config.num_query_groups // config.tensor_model_parallel_size
    yield Joined("self_attention.linear_qkv", hidden, parts, blocks=blocks)
    yield Joined("self_attention.linear_proj", queries, {"self_attn.o_proj": AdaptedPart(hidden)}, "inputs")


def _latent(config: Any) -> Iterator[Joined]:
    hidden, heads, compressed = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    queries = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
    keys_and_values, values = heads * (config.qk_head_dim + config.v_head_dim), heads * config.v_head_dim
    of_queries = {"linear_q_proj": ("q_proj", hidden, queries, "outputs")}
    if config.q_lora_rank:
        of_queries = {
            "linear_q_down_proj": ("q_a_proj", hidden, config.q_lora_rank, "nothing"),
            "linear_q_up_proj": ("q_b_proj", config.q_lora_rank, queries, "outputs"),
        }
    layers = of_queries | {
        "linear_kv_down_proj": ("kv_a_proj_with_mqa", hidden, compressed + config.qk_pos_emb_head_dim, "nothing"),
        "linear_kv_up_proj": ("kv_b_proj", compressed, keys_and_values, "outputs"),
        "linear_proj": ("o_proj", values, hidden, "inputs"),
    }
    for place, (name, inputs, outputs, splits) in layers.items():
        yield Joined(f"self_attention.{place}", inputs, {f"self_attn.{name}": AdaptedPart(outputs)}, splits)


def _delta_net(config: Any, family: str) -> Iterator[Joined]:
    """Yield the layers of a gated delta net, whose heads are key heads; several value heads belong to each."""
    hidden, keys, heads = config.hidden_size, config.linear_key_head_dim, config.linear_num_key_heads
    each = config.linear_num_value_heads // heads
    values = each * config.linear_value_head_dim
    modules = {
        "in_proj_qkv": ((keys, keys, values), True),
        "in_proj_z": ((values,), False),
        "in_proj_b": ((each,), False),
        "in_proj_a": ((each,), False),
    }
    if family == "qwen3_next":
        modules = {"in_proj_qkvz": ((keys, keys, values, values), False), "in_proj_ba": ((each, each), False)}
    parts = {
        f"linear_attn.{name}": AdaptedPart(heads * sum(runs), runs, by_run) for name, (runs, by_run) in modules.items()
    }
    yield Joined("self_attention.in_proj", hidden, parts)
    yield Joined("self_attention.out_proj", heads * values, {"linear_attn.out_proj": AdaptedPart(hidden)}, "inputs")


def by_run(rows: Tensor, runs: Sequence[int], blocks: int = 1) -> Tensor:
    """Reorder rows that lie head by head: in each of the blocks, the first run of all heads, then their second."""
    heads = rows.unflatten(0, (blocks, -1, sum(runs)))
    return torch.cat([run.flatten(1, 2) for run in heads.split(list(runs), 2)], 1).flatten(0, 1)


def by_head(rows: Tensor, runs: Sequence[int]) -> Tensor:
    """Reorder rows that lie run by run: all runs of the first head, then the next head's."""
    heads = len(rows) // sum(runs)
    parts = rows.split([heads * run for run in runs])
    return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 1)


NAME = "lora"  # of a chunk's adapters in its module tree


class AdapterShare(torch.nn.Module):
    """A rank's share of the adapter of a Hugging Face module, `layer`: one whole matrix and a part of the other.

    The rows of `b` lie head by head, so that ranks get whole heads.
    """

    def __init__(self, layer: str, part: AdaptedPart, whole: Adapter, splits: str, weight: Tensor) -> None:
        super().__init__()
        self.layer, self.part, self.shapes = layer, part, tuple(matrix.shape for matrix in whole)
        if part.by_run:
            whole = Adapter(whole.a, by_head(whole.b, part.runs))
        axes = {"inputs": (1, None), "outputs": (None, 0), "nothing": (None, None)}[splits]
        self.a, self.b = (_share(matrix, axis, weight) for matrix, axis in zip(whole, axes, strict=True))

    def forward(self) -> Adapter:
        """Return both matrices after the last step's update: Megatron may still gather them (a pre-hook waits)."""
        return Adapter(self.a, self.b)

    def whole(self) -> Adapter:
        """Gather the adapter from the tensor-parallel ranks, which all call this."""
        a, b = (_gather(parameter) for parameter in (self.a, self.b))
        return Adapter(a, by_run(b, self.part.runs) if self.part.by_run else b)

    def shard(self, name: str) -> Any:
        """Return a parameter for Megatron's checkpoints, under a name that is the same in every layout."""
        parameter, key = getattr(self, name), f"{NAME}.{self.layer}.{name}"
        if parameter.tensor_model_parallel:
            return make_tp_sharded_tensor_for_checkpoint(parameter, key, parameter.partition_dim)
        return make_sharded_tensor_for_checkpoint(parameter, key)


def _share(whole: Tensor, axis: int | None, weight: Tensor) -> torch.nn.Parameter:
    """Return this rank's part of a matrix along `axis`, or all of it, like `weight`."""
    tp, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    mine = whole if axis is None else whole.chunk(tp, axis)[rank]
    parameter = torch.nn.Parameter(mine.to(weight.device, weight.dtype, copy=True))
    set_tensor_model_parallel_attributes(parameter, axis is not None, axis or 0, 1)
    # each rank's gradient covers its part of the sequence: Megatron sums gradients with this mark
    parameter.sequence_parallel = axis is None and tp > 1
    return parameter


def _gather(parameter: Tensor) -> Tensor:
    if not parameter.tensor_model_parallel:
        return parameter.detach()
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(parameter) for _ in range(group.size())]
    dist.all_gather(parts, parameter.detach().contiguous(), group=group)
    return torch.cat(parts, parameter.partition_dim)


class LayerAdapter(torch.nn.Module):
    """The adapter of one of Megatron's layers: `shares` of the adapted modules by name."""

    def __init__(self, joined: Joined, shares: dict[str, AdapterShare], scale: float) -> None:
        super().__init__()
        self.joined, self.scale, self.paused = joined, scale, False
        self.shares = torch.nn.ModuleDict({name.rpartition(".")[2]: share for name, share in shares.items()})

    def forward(self, layer: torch.nn.Module, x: Tensor) -> Tensor:
        """Map the input of `layer`, `[tokens, 1, in]`, to the addend of its output, both in this rank's shares."""
        tp, joined = parallel_state.get_tensor_model_parallel_world_size(), self.joined
        pairs = {name: share() for name, share in self.shares.items()}
        x = F.linear(_as_multiplied(layer, x), torch.cat([pair.a for pair in pairs.values()]))
        if tp > 1 and joined.splits != "nothing":
            gather, scatter = gather_from_sequence_parallel_region, reduce_scatter_to_sequence_parallel_region
            x = scatter(x) if joined.splits == "inputs" else gather(x)
        narrow = dict(zip(pairs, x.chunk(len(pairs), -1), strict=True))
        added = []
        for name, part in joined.parts.items():
            if (short := name.rpartition(".")[2]) in narrow:
                b = pairs[short].b
                rows = by_run(b, part.runs, joined.blocks) if part.runs else b
                addend = F.linear(narrow[short], rows)
            else:
                addend = x.new_zeros(*x.shape[:-1], part.outputs // tp)
            added.append(addend.unflatten(-1, (joined.blocks, -1)))
        return torch.cat(added, -1).flatten(-2) * self.scale


def _as_multiplied(layer: torch.nn.Module, x: Tensor) -> Tensor:
    """Return the input of a layer's matrix product; a fused layer applies its norm first."""
    gain = getattr(layer, "layer_norm_weight", None)
    if gain is None:
        return x
    gain = gain + 1 if layer.config.layernorm_zero_centered_gamma else gain
    return F.rms_norm(x, gain.shape, gain, layer.config.layernorm_epsilon)


def _add(adapter: LayerAdapter, layer: torch.nn.Module, inputs: tuple[Tensor], output: tuple[Tensor, Any]) -> Any:
    """Add the adapter in a forward hook; a layer's output is a pair with its bias."""
    if adapter.paused:
        return output
    return output[0] + adapter(layer, inputs[0]), output[1]


class ChunkAdapters(torch.nn.ModuleList):
    """All adapters of a model chunk."""

    def shares(self) -> Iterator[tuple[str, AdapterShare]]:
        """Yield each share with its place in this module."""
        for place, module in self.named_modules():
            if isinstance(module, AdapterShare):
                yield place, module

    def sharded_state_dict(self, metadata: Any = None) -> dict[str, Any]:
        """Return the chunk's state for Megatron's checkpoints: only the adapters; the rest is the initial model."""
        return {f"{place}.{name}": share.shard(name) for place, share in self.shares() for name in ("a", "b")}


def attach(chunk: torch.nn.Module, lora: LoRA, seed: int, body: str, family: str) -> ChunkAdapters:
    """Add new adapters to a loaded GPTModel chunk; only they are trainable afterwards.

    `body` is the name of transformers' module that has the layers, `family` the model type.
    """
    config = chunk.config
    if config.normalization != "RMSNorm":
        raise ValueError("adapters are written for layers with RMSNorm")
    chunk.requires_grad_(False)
    for router in [module for module in chunk.modules() if hasattr(module, "expert_bias")]:
        router.frozen_expert_bias = True  # not a parameter: Megatron updates it itself
    adapters = ChunkAdapters()
    for decoder_layer in chunk.decoder.layers:
        prefix = f"{body}.layers.{decoder_layer.layer_number - 1}"
        for joined in joined_layers(config, family):
            names = [name for name in joined.parts if lora.adapts(name)]
            linear = _find(decoder_layer, joined.place)
            if not names or linear is None:
                continue
            shares = {}
            for name in names:
                layer = f"{prefix}.{name}"
                part = joined.parts[name]
                whole = initial_adapter(lora, seed, layer, joined.inputs, part.outputs)
                shares[name] = AdapterShare(layer, part, whole, joined.splits, linear.weight)
            adapters.append(adapter := LayerAdapter(joined, shares, lora.scale))
            linear.register_forward_hook(partial(_add, adapter), prepend=True)  # before Gemma's norm after the layer
    if chunk.pre_process:  # recomputed layers have gradients only if their input has one
        chunk.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    chunk.add_module(NAME, adapters)
    return adapters


def _find(module: torch.nn.Module, place: str) -> torch.nn.Module | None:
    for name in place.split("."):
        module = getattr(module, name, None)
    return module


class LoRABridge:
    """A Bridge that attaches adapters, `of_layers`, to loaded models; an export merges them into the weights.

    `body` is the name of transformers' module that has the layers. In checkpoints of images it may be another.
    `family` is the model type.
    """

    def __init__(self, bridge: Bridge, lora: LoRA, seed: int, body: str, family: str) -> None:
        self._bridge, self._lora, self._seed = bridge, lora, seed
        self._body, self._family = body, family
        self.of_layers: list[LayerAdapter] = []

    def build(self) -> list[torch.nn.Module]:
        return self._bridge.build()

    def load(self, models: list[torch.nn.Module], path: Path) -> None:
        """Load the weights; the adapters are new."""
        self._bridge.load(models, path)
        self._shares: dict[str, AdapterShare] = {}
        for chunk in models:
            adapters = attach(chunk, self._lora, self._seed, self._body, self._family)
            self._shares |= {share.layer: share for _, share in adapters.shares()}
            self.of_layers += adapters
        self._dtype = next(models[0].parameters()).dtype
        # which pipeline stage has the adapter of a layer, and its shapes, in the same order on all ranks
        shapes = {layer: share.shapes for layer, share in self._shares.items()}
        stages: list[Any] = [None] * parallel_state.get_pipeline_model_parallel_world_size()
        dist.all_gather_object(stages, shapes, group=parallel_state.get_pipeline_model_parallel_group())
        self._layers = {layer: (stage, its) for stage, of in enumerate(stages) for layer, its in of.items()}
        refuse_unmatched(self._lora, self._layers)
        if not all(stages):
            raise ValueError(
                "a pipeline stage has no layer with an adapter: give each stage one of actor.target_modules"
            )

    def export(self, models: list[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
        hidden = {model: model._modules.pop(NAME) for model in models}
        try:
            for name, weight in self._bridge.export(models):
                _, _, inner = name.removesuffix(".weight").partition(".layers.")
                if (layer := f"{self._body}.layers.{inner}") in self._layers:
                    weight = self._adapter(layer).merge(weight, self._lora.scale)
                yield name, weight
                del weight
        finally:
            for model, adapters in hidden.items():
                model.add_module(NAME, adapters)

    def adapters(self) -> Iterator[tuple[str, Adapter]]:
        """Yield all adapters by layer, whole. A collective, as `export` is."""
        for layer in self._layers:
            yield layer, self._adapter(layer)

    def _adapter(self, layer: str) -> Adapter:
        """Return the adapter of a layer of any pipeline stage."""
        stage, shapes = self._layers[layer]
        group = parallel_state.get_pipeline_model_parallel_group()
        if layer in self._shares:
            whole = self._shares[layer].whole()
        else:
            device = torch.cuda.current_device()
            whole = Adapter(*(torch.empty(shape, dtype=self._dtype, device=device) for shape in shapes))
        if group.size() > 1:
            for matrix in whole:
                dist.broadcast(matrix, group=group, group_src=stage)
        return whole
