"""Settings of a model that a bridge needs, read from transformers' own config: both bridges leave some of it out.

Rotary frequencies are transformers' own for every `rope_type`. YaRN's factor on cosine and sine scales queries and keys
alike, so it goes, squared, into the softmax's scale: Transformer Engine's rotary kernel for packed sequences drops it.
"""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from allocation.families import FAMILIES
from allocation.model_spec import load_model
from areal_like.data.model_types import register_model_types
from areal_like.trainer.megatron.bridges.language_part import LANGUAGE_FAMILIES, OMITTED


@dataclass(frozen=True)
class ModelConfig:
    """`for_bridge` is the model's config without rope scaling, in the form of transformers 4, which bridges read.

    `options` are fields of Megatron's TransformerConfig; `frequencies` are the rotary embedding's, `[rotary / 2]`, or
    None for Megatron's own, and `local_frequencies` apply to layers with a window, where they differ. `fixed` are
    options that settings of a run may not change. `logit_cap` is the soft cap on the logits.
    """

    for_bridge: PretrainedConfig
    options: dict[str, Any]
    frequencies: Tensor | None
    fixed: dict[str, Any] = field(default_factory=dict)
    local_frequencies: Tensor | None = None
    axes: Tensor | None = None

    @property
    def logit_cap(self) -> float | None:
        return getattr(self.for_bridge, "final_logit_softcapping", None)

    @property
    def body(self) -> str:
        """Name of transformers' module that has the layers."""
        return "model" if self.axes is None else "model.language_model"

    def set_frequencies(self, chunks: Iterable[torch.nn.Module]) -> None:
        """Give the rotary embeddings of built model chunks the model's own frequencies."""
        for chunk in chunks:
            for module in chunk.modules():
                if self.frequencies is not None and isinstance(module, RotaryEmbedding):
                    module.inv_freq = self.frequencies.to(module.inv_freq)


def read_config(path: Path) -> ModelConfig:
    """Read the config.json of a checkpoint directory that passed `support.bridge_problems`."""
    register_model_types()
    config = AutoConfig.from_pretrained(path)
    axes = _rotary_axes(config) if hasattr(config, "vision_config") else None
    config = _language_model(config)
    by_layer, latent = config.rope_parameters, FAMILIES[config.model_type].latent_attention
    rope = by_layer.get("full_attention", by_layer)
    options = _of_family(config) | _windows(path)
    frequencies = local = None
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    plain = deepcopy(config)
    plain.head_dim = head_dim  # mbridge multiplies with it, even where it is null
    if rope is not by_layer:
        (frequencies, _), (local, _) = (_frequencies(plain, kind) for kind in ("full_attention", "sliding_attention"))
        plain.rope_local_base_freq = by_layer["sliding_attention"]["rope_theta"]
        options["rotary_base"] = rope["rope_theta"]
    elif rope["rope_type"] != "default":
        frequencies, scaling = _frequencies(plain)
        if latent:
            options |= {"rotary_scaling_factor": rope["factor"], "mscale_all_dim": rope.get("mscale_all_dim") or 0}
        elif scaling != 1:
            options["softmax_scale"] = scaling**2 / head_dim**0.5
    plain.partial_rotary_factor = rope.get("partial_rotary_factor", 1.0)
    kept = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    plain.rope_parameters = {"rope_type": "default", **kept}
    plain.rope_theta = rope["rope_theta"]  # without it mbridge raises and others fall back to base 10,000
    fixed = {"apply_rope_fusion": False} if latent else {}  # fused, it is Megatron's own YaRN
    return ModelConfig(plain, options, frequencies, fixed, local, axes)


def _language_model(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the language model of a model with images, in the form of a text-only family."""
    family = LANGUAGE_FAMILIES.get(config.model_type)
    if family is None:
        return config
    fields = {name: value for name, value in config.get_text_config().to_dict().items() if name != "model_type"}
    fields = {**OMITTED.get(family, {}), **fields}
    fields |= {
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]],
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    return AutoConfig.for_model(family, **fields)


def _rotary_axes(config: PretrainedConfig) -> Tensor:
    """Return the position that rotates each frequency, `[frequencies]`: 0 for time, 1 for height, 2 for width."""
    rope = config.get_text_config().rope_parameters
    section = rope["mrope_section"]
    if not rope.get("mrope_interleaved"):
        return torch.arange(3).repeat_interleave(torch.tensor(section))
    axes = torch.zeros(sum(section), dtype=torch.long)
    for axis in (1, 2):
        axes[axis : 3 * section[axis] : 3] = axis
    return axes


def _frequencies(config: PretrainedConfig, kind: str | None = None) -> tuple[Tensor, float]:
    """Return a rope's frequencies `[rotary / 2]` and its factor on cosine and sine, of layers of a `kind`."""
    rope, cpu = config.rope_parameters, torch.device("cpu")
    rope = rope[kind] if kind else rope
    if rope["rope_type"] == "default":
        return rope["rope_theta"] ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float) / config.head_dim), 1.0
    frequencies: tuple[Tensor, float] = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device=cpu, layer_type=kind)
    return frequencies


def _windows(path: Path) -> dict[str, Any]:
    """Return the sliding window, and which layers have it; a bridge would give every layer the same, or none."""
    model = load_model(str(path))
    if not model.sliding_layers:
        return {"window_size": None}
    slides = [int(number in model.sliding_layers) for number in range(model.layers)]
    return {"window_size": (model.window - 1, 0), "window_attn_skip_freq": slides}


def _of_family(config: PretrainedConfig) -> dict[str, Any]:
    """Return the options of the model's family, Megatron's names of its kernels among them."""
    megatron = FAMILIES[config.model_type].megatron
    options = dict(megatron.options(config)) if megatron else {}
    if backend := options.get("attention_backend"):
        options["attention_backend"] = AttnBackend[backend]
    return options
