"""Configuration fields that SGLang 0.5.17 reads and transformers 5.12 has renamed or dropped."""

from functools import cache
from importlib import import_module
from typing import Any

from areal_like.data.model_types import register_model_types
from areal_like.rollout.sglang.patch import Patch

# By configuration class: SGLang's name of a field, and transformers' name of it
_RENAMED = {"gemma2.Gemma2Config": {"hidden_act": "hidden_activation"}}
# Values of fields that transformers' models have fixed, where a config.json leaves them out
_DROPPED: dict[str, dict[str, Any]] = {
    "gpt_oss.GptOssConfig": {"swiglu_limit": 7.0},
    "minimax_m2.MiniMaxM2Config": {"scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True},
    "deepseek_v2.DeepseekV2Config": {"moe_layer_freq": 1, "scoring_func": "softmax"},
    "deepseek_v3.DeepseekV3Config": {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}


@cache  # a forked process has them already
def restore_config_names() -> None:
    """Add the names that SGLang reads to transformers' configurations."""
    for path, names in _RENAMED.items():
        kind = _find(path)
        kind.attribute_map = {**kind.attribute_map, **names}
    for path, values in _DROPPED.items():
        for name, value in values.items():
            setattr(_find(path), name, value)
    _count_expert_groups()
    _complete_exaone4()
    _read_layer_types()
    _leave_out_deepstack()
    register_model_types()


def _find(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"transformers.models.{module}.configuration_{module}"), name)


def _count_expert_groups() -> None:
    """Count the experts of a deepseek_v2 without groups as one group, as SGLang's models need."""
    kind = _find("deepseek_v2.DeepseekV2Config")
    complete = kind.__post_init__

    def complete_with_groups(config: Any, **named: Any) -> None:
        complete(config, **named)
        if config.n_group is None:
            config.n_group = config.topk_group = 1

    kind.__post_init__ = complete_with_groups


def _complete_exaone4() -> None:
    """Convert exaone4's window pattern to the letters that SGLang counts, and give its rope a base."""
    kind = _find("exaone4.Exaone4Config")
    complete = kind.__post_init__

    def complete_with_letters(config: Any, **named: Any) -> None:
        complete(config, **named)
        if isinstance(every := config.sliding_window_pattern, int):
            config.sliding_window_pattern = "L" * (every - 1) + "G" if every else None
        config.rope_theta = config.rope_parameters["rope_theta"]

    kind.__post_init__ = complete_with_letters


def _leave_out_deepstack() -> None:
    """Disable DeepStack layers of a qwen3_5: transformers writes none, and SGLang defaults to Qwen3-VL's."""
    from sglang.srt.configs.qwen3_5 import Qwen3_5VisionConfig

    build = Qwen3_5VisionConfig.__init__

    def build_without(config: Any, **named: Any) -> None:
        build(config, **{"deepstack_visual_indexes": [], **named})

    Qwen3_5VisionConfig.__init__ = build_without


def _read_layer_types() -> None:
    """Read gated delta nets from `layer_types`, which transformers writes in place of an interval."""
    from sglang.srt.configs.qwen3_next import HybridLayerType, Qwen3NextConfig

    build, of_interval = Qwen3NextConfig.__init__, Qwen3NextConfig.layers_block_type.fget
    kinds = {kind: HybridLayerType[kind].value for kind in ("full_attention", "linear_attention")}

    def keep_layer_types(config: Any, *arguments: Any, layer_types: list[str] | None = None, **named: Any) -> None:
        rope = dict(named.pop("rope_parameters", None) or {})  # as transformers writes them, and SGLang does not read
        named |= {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
        if rope.get("rope_type", "default") != "default":
            named["rope_scaling"] = rope
        build(config, *arguments, **named)
        config.layer_types = layer_types

    def layers_block_type(config: Any) -> list[str]:
        types = getattr(config, "layer_types", None)
        found: list[str] = [kinds[kind] for kind in types] if types else of_interval(config)
        return found

    Qwen3NextConfig.__init__ = keep_layer_types
    Qwen3NextConfig.layers_block_type = property(layers_block_type)


PATCH = Patch(prepare=lambda launch: restore_config_names() or (), schedule=lambda launch: restore_config_names())
