"""transformers' own model, sharded over all ranks by torch's FSDP2 (`torch.distributed.fsdp.fully_shard`)."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from areal_like.backends.fsdp import attention, lora
from areal_like.backends.fsdp.checkpoint_names import (
    auto_class,
    decoder_layers,
    has_tower,
    in_checkpoint,
    kept_tensors,
    tower_layers,
    tower_parts,
)
from areal_like.backends.fsdp.grid import Grid
from areal_like.backends.fsdp.support import has_plain_attention, has_states, looks_ahead
from areal_like.backends.fsdp.tensor_parallel import split_matrices
from areal_like.backends.training.packed_delta_net import DeltaRule, causal_convolution, packed_delta_rule
from areal_like.backends.training.value_head import new_head, stored_head
from areal_like.core.trainer.engine import EngineSpec
from areal_like.core.trainer.logprobs import fp32_logits
from areal_like.data.model_types import register_model_types


def pack_delta_nets(model: torch.nn.Module) -> None:
    """Reset transformers' own torch implementations at the start of each sequence of a pack."""
    for module in model.modules():
        rule = getattr(module, "chunk_gated_delta_rule", None)
        if rule is not None and rule.__name__ == "torch_chunk_gated_delta_rule":
            module.chunk_gated_delta_rule = partial(_delta_rule, rule)
        if rule is not None and module.causal_conv1d_fn is None:
            module.causal_conv1d_fn = _convolution


def _delta_rule(
    rule: DeltaRule, query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Any, **how: Any
) -> tuple[Tensor, Tensor | None]:
    if cu_seqlens is None:
        return rule(query, key, value, g=g, beta=beta, **how)
    return packed_delta_rule(rule, query, key, value, g, beta, cu_seqlens, **how), None


def _convolution(
    *, x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, activation: str = "silu"
) -> Tensor:
    return causal_convolution(x, weight, bias, None if seq_idx is None else seq_idx[0])


def sharded_model(spec: EngineSpec, device: torch.device, grid: Grid) -> PreTrainedModel:
    """Build the model of `spec`; layers are gathered one at a time in its data type.

    Ranks that split matrices have parts of the decoder layers' matrices; all else is sharded over all ranks.

    Shards of trained parameters are float32. Weights beside adapters keep the data type of their use. Raises
    ValueError for a model whose attention does not fit the layout and `mb_spec`.
    """
    path, engine = spec.path, spec.config
    dtype = getattr(torch, engine.dtype)
    attention.register()
    register_model_types()
    of_model = AutoConfig.from_pretrained(path)
    model = auto_class(of_model).from_pretrained(path, dtype=dtype, attn_implementation=_attention(spec, of_model))
    _without_dropout(model)
    pack_delta_nets(model)
    model.get_input_embeddings().padding_idx = None  # Megatron's trainer trains the embedding of every word
    if engine.freeze_vision_tower and has_tower(model):
        for part in tower_parts(model):
            part.requires_grad_(False)
    if spec.lora:
        lora.attach(model, spec.lora, spec.seed)
    heads = [_with_value_head(model, spec)] if spec.role == "critic" else []
    if engine.fp32_head and not heads:
        head = model.get_output_embeddings()
        head.forward = lambda hidden: _fp32_output(hidden, head)
    if engine.fsdp.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if grid.tensor is not None:
        split_matrices(model, grid.tensor)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if engine.fsdp.offload_params and device.type == "cuda" else OffloadPolicy()
    for head in heads:
        fully_shard(head, mesh=grid.everyone, mp_policy=MixedPrecisionPolicy(torch.float32), offload_policy=offload)
    layers = decoder_layers(model)
    for part in (*tower_layers(model), *layers, model):
        mesh = grid.data if part in [*layers] else grid.everyone
        fully_shard(part, mesh=mesh, mp_policy=precision, offload_policy=offload)
    return (model if spec.lora else model.float()).train()


def _fp32_output(hidden: torch.Tensor, head: torch.nn.Linear) -> torch.Tensor:
    logits = fp32_logits(hidden, head.weight)
    return logits if head.bias is None else logits + head.bias.float()


def _without_dropout(model: PreTrainedModel) -> None:
    """Disable dropout, because servers sample without it; Megatron's trainer does the same."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("dropout" in name or "jitter" in name):
                setattr(module, name, 0.0)


def _with_value_head(model: PreTrainedModel, spec: EngineSpec) -> torch.nn.Module:
    """Make a critic of a language model: its logits are values, in float32. Returns the head."""
    hidden = model.get_input_embeddings().embedding_dim
    head = torch.nn.Linear(hidden, 1, bias=False)
    stored = stored_head(spec.path)
    head.weight.data.copy_(new_head(hidden, spec.seed) if stored is None else stored)
    model.set_output_embeddings(head)
    model.config.final_logit_softcapping = None  # Gemma's
    return head


def take_weights(model: PreTrainedModel, path: Path, decay: float) -> None:
    """Replace the weights by a Hugging Face checkpoint's, except for the share `decay` of the present ones."""
    files: dict[str, Path] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            files |= dict.fromkeys(tensors.keys(), file)
    parameters = {name for name, _ in model.named_parameters()}
    for name, kept in kept_tensors(model):
        if name in parameters and not isinstance(kept, DTensor):  # a forward pass without a later resharding
            raise TypeError(f"{name} is gathered, and would not be replaced on all ranks")
        whole = torch.empty(kept.shape, dtype=kept.dtype)
        for stored, part in in_checkpoint(model, name, whole).items():
            with safe_open(files[stored], "pt") as tensors:
                part.copy_(tensors.get_tensor(stored))
        new = whole.to(kept.device)
        if isinstance(kept, DTensor):
            new = distribute_tensor(new, kept.device_mesh, kept.placements, src_data_rank=None).to(kept.device)
        kept.data.lerp_(new, 1 - decay)


def _attention(spec: EngineSpec, of_model: PreTrainedConfig) -> str | dict[str, str]:
    """Return the attention implementation of a model: ours if it supports the model, else transformers' own.

    A tower has transformers' own, which computes each image by itself.
    """
    config, kind = of_model.to_dict(), auto_class(of_model)._model_mapping.get(type(of_model), None)
    ours = has_plain_attention(config) and getattr(kind, "_supports_attention_backend", False)
    packed = {"text_config": attention.NAME, "vision_config": "sdpa"} if "vision_config" in config else attention.NAME
    if ours and not has_states(config):
        return packed
    if spec.sizes.cp > 1:
        raise ValueError(f"{spec.path} has attention that ranks cannot share; its layout has c{spec.sizes.cp}")
    if spec.config.mb_spec.share_prompts:
        raise ValueError(
            f"{spec.path} has attention that does not support shared prompts; write mb_spec.share_prompts=false"
        )
    if looks_ahead(config):
        raise ValueError(f"{spec.path} has attention to later tokens (use_bidirectional_attention)")
    if ours:
        return packed
    has_sdpa = getattr(kind, "_supports_sdpa", False) and not config.get("attn_logit_softcapping")  # sdpa does not cap
    return "sdpa" if has_sdpa else "eager"
