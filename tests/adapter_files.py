"""Adapters as a trainer writes them, and the models that they are merged with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from areal_like.backends.sglang.adapted_layers import adapted_layers, usual_name
from areal_like.backends.training.lora import Adapter, _peft_config
from areal_like.core.config.schema import ALL_LINEAR
from areal_like.core.trainer.engine import LoRA


def write_adapter(
    model: Path,
    folder: Path,
    seed: int,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    size: float = 0.15,
    targets: Sequence[str] = (ALL_LINEAR,),
) -> tuple[Path, Path]:
    """Write an adapter as the trainer does, and the model that it is merged with, in float32."""
    lora, generator = LoRA(rank, alpha, tuple(targets)), torch.Generator().manual_seed(seed)
    weights, tensors, merged = load_file(model / "model.safetensors"), {}, folder / f"merged-{seed}"
    weights = {name: weight.float() for name, weight in weights.items()}
    layers = {
        layer: shape for layer, shape in adapted_layers([ALL_LINEAR], model).items() if lora.adapts(usual_name(layer))
    }
    for layer, (outputs, inputs) in layers.items():
        a, b = (torch.randn(shape, generator=generator) * size for shape in ((rank, inputs), (outputs, rank)))
        tensors |= {f"base_model.model.{layer}.lora_A.weight": a, f"base_model.model.{layer}.lora_B.weight": b}
        weights[f"{layer}.weight"] = Adapter(a, b).merge(weights[f"{layer}.weight"], lora.scale)
    shutil.copytree(model, merged)
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    adapter = folder / f"adapter-{seed}"
    adapter.mkdir(parents=True)
    save_file(tensors, adapter / "adapter_model.safetensors")
    names = sorted({layer.rpartition(".")[2] for layer in layers})
    (adapter / "adapter_config.json").write_text(json.dumps(_peft_config(lora, str(model), names)))
    return adapter, merged
