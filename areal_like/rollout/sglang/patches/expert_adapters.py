"""Sizes of adapters in models with experts: SGLang 0.5.17 reads some in config.json that belong to another layer."""

from __future__ import annotations

from typing import Any

from areal_like.rollout.sglang.patch import Patch


def measure_feed_forward() -> None:
    """Size adapters of a layer's shared expert, or of a dense layer, by its matrices.

    SGLang takes sizes in config.json, which belong to another layer in qwen2_moe.
    """
    from sglang.srt.lora import mem_pool
    from sglang.srt.lora.layers import BaseLayerWithLoRA, FusedMoEWithLoRA

    by_config = mem_pool.get_hidden_dim

    def measure(name: str, config: Any, model: Any, layer: int, *others: Any) -> tuple[int, int]:
        for found, module in model.model.layers[layer].named_modules():
            adapted = isinstance(module, BaseLayerWithLoRA) and not isinstance(module, FusedMoEWithLoRA)
            if adapted and found.rpartition(".")[2] == name:
                return module.base_layer.input_size, module.base_layer.output_size
        sizes: tuple[int, int] = by_config(name, config, model, layer, *others)
        return sizes

    mem_pool.get_hidden_dim = measure


PATCH = Patch(schedule=lambda launch: measure_feed_forward() if launch.server.enable_lora else None)
