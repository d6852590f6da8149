"""Layers of families whose own in Megatron Bridge cannot take packed sequences, or need missing libraries."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import router
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from areal_like.backends.megatron import delta_nets
from areal_like.backends.megatron.bridges.config import ModelConfig
from areal_like.backends.megatron.plain_attention import PlainAttention


@dataclass(frozen=True)
class OwnLayers:
    """`spec` of a model's layers, a `transformer_layer_spec` of Megatron Bridge; `finish` changes a built chunk."""

    spec: Callable[..., Any]
    finish: Callable[[torch.nn.Module, ModelConfig], None]


class RotaryOfLayer(SelfAttention):
    """Attention that takes its half of two rotary embeddings: the second is for layers with a window."""

    def forward(self, hidden_states: Tensor, attention_mask: Any, *, rotary_pos_emb: Tensor, **others: Any) -> Any:
        config = self.config
        slides = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number)
        own = rotary_pos_emb.chunk(2, -1)[slides].contiguous()
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=own, **others)


def gemma_layers(config: TransformerConfig) -> ModuleSpec:
    """Return the spec of Gemma 2's and 3's layers, with norms behind attention and feed-forward too.

    Transformer Engine has no soft caps on scores.
    """
    backend = TESpecProvider()
    norm = backend.layer_norm(rms_norm=True, for_qk=True) if config.qk_layernorm else None
    capped = getattr(config, "attn_logit_softcapping", None)
    first, last = backend.column_parallel_layer_norm_linear(), _with_norm(backend)
    attention = SelfAttentionSubmodules(
        linear_qkv=first,
        core_attention=PlainAttention if capped else backend.core_attention(),
        linear_proj=last,
        **({"q_layernorm": norm, "k_layernorm": norm} if norm else {}),
    )
    kind = RotaryOfLayer if config.qk_layernorm else SelfAttention
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(kind, {"attn_mask_type": AttnMaskType.causal}, attention),
            self_attn_bda=get_bias_dropout_add,
            mlp=ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=first, linear_fc2=last)),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def gpt_oss_layers(config: Any) -> ModuleSpec:
    """Return the spec of gpt-oss's layers with an attention of our own, because of its sinks, and routers with biases.

    For sinks in packs Transformer Engine needs cuDNN 9.18, and without it keeps all scores in memory.
    """
    from megatron.bridge.models.conversion.param_mapping import AutoMapping
    from megatron.bridge.models.gpt_provider import default_layer_spec

    router.router_gating_linear = router_logits
    AutoMapping.register_module_type(PlainAttention.__name__, "column")  # for the sinks, split as the heads are
    layer: ModuleSpec = default_layer_spec(config)
    layer.submodules.self_attention.submodules.core_attention = PlainAttention
    return layer


def router_logits(tokens: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a router's logits in `dtype`, in place of Megatron's function.

    Transformer Engine's product, if given the bias, reads one in bfloat16 as float32.
    """
    logits: Tensor = router_gating_linear(tokens, weight, None, dtype)
    return logits if bias is None else logits + bias.to(dtype)


def _with_norm(backend: Any) -> type:
    """Return the row-parallel layer with a norm behind it, under its name in Megatron Bridge's maps.

    The norm is a hook: an adapter's output, which another hook adds, comes before it.
    """
    linear, norm = backend.row_parallel_linear(), backend.layer_norm(rms_norm=True)

    class TERowParallelLinearLayerNorm(linear):  # type: ignore[misc, valid-type]
        def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **others: Any) -> None:
            super().__init__(input_size, output_size, config=config, **others)
            self.post_layernorm = norm(config, output_size, config.layernorm_epsilon)
            self.register_forward_hook(lambda _, inputs, output: (self.post_layernorm(output[0]), output[1]))

    return TERowParallelLinearLayerNorm


def finish_gemma(model: torch.nn.Module, config: ModelConfig) -> None:
    """Scale a chunk's embedding, and give it the rotary embedding of layers with a window beside the other one."""
    if hasattr(model, "embedding"):
        scale = config.for_bridge.hidden_size**0.5
        model.embedding.register_forward_hook(
            lambda _, inputs, output: output * torch.tensor(scale, dtype=output.dtype, device=output.device)
        )
    if config.local_frequencies is None:
        return
    local = copy(model.rotary_pos_emb)
    local.inv_freq = config.local_frequencies.to(local.inv_freq)

    def add_local(_: torch.nn.Module, inputs: tuple, named: dict[str, Any], output: Tensor) -> Tensor:
        return torch.cat([output, local.forward(*inputs, **named)], -1)  # not called: it has this hook too

    model.rotary_pos_emb.register_forward_hook(add_local, with_kwargs=True)


def delta_net_layers(config: TransformerConfig, vp_stage: int | None = None) -> Any:
    """Return the spec of layers that include gated delta nets; flash-linear-attention is optional."""
    delta_nets.install()
    specs.TESpecProvider = TESpecProvider  # which it does not import without Transformer Engine
    block = specs.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
    norm = TESpecProvider().layer_norm(rms_norm=True)
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        if hasattr(attention, "out_norm"):
            attention.out_norm = _as_stored(norm)
    return block


def _as_stored(norm: Any) -> type:
    """Return a norm with the checkpoint's weight.

    Megatron stores norms of these families minus 1, which would lose bits on the way there and back.
    """
    from megatron.bridge.models.conversion.param_mapping import AutoMapping
    from megatron.bridge.models.qwen import qwen3_next_bridge, qwen35_bridge

    for module in (qwen3_next_bridge, qwen35_bridge):
        module.RMSNorm2ZeroCenteredRMSNormMapping = AutoMapping

    class NormAsStored:
        def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float) -> Any:
            plain = copy(config)
            plain.layernorm_zero_centered_gamma = False
            return norm(plain, hidden_size, eps)

    return NormAsStored


def _leave(model: torch.nn.Module, config: ModelConfig) -> None:
    """Change nothing."""


OWN_LAYERS: dict[str, OwnLayers] = {
    "gpt_oss": OwnLayers(gpt_oss_layers, _leave),
    **dict.fromkeys(("gemma2", "gemma3_text"), OwnLayers(gemma_layers, finish_gemma)),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), OwnLayers(delta_net_layers, _leave)),
}
