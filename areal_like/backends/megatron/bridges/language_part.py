"""The language model of a model of text and images as one of text alone: config.json, for the checks. No torch."""

from collections.abc import Mapping
from typing import Any

# The family of text alone that computes the language model of each family with images, but for positions and images.
LANGUAGE_FAMILIES = {
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
# Fields that are as here in the family with images if its config omits them, otherwise in the text-only family
OMITTED: dict[str, Mapping[str, Any]] = {"qwen3_moe": {"norm_topk_prob": True}}
TOWER = "visual"  # the tower's name in transformers' models of these families, and in a chunk of Megatron's
_VISION_FIELDS = ("vision_config", "text_config", "architectures")
_TIED = "tie_word_embeddings"
_ROPES = ("rope_parameters", "rope_scaling")


def language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of a model's language model, in the form of a family of text alone.

    Published Qwen2.5-VL have its fields beside `vision_config`, and name their positions as the type of their rope.
    """
    family = LANGUAGE_FAMILIES.get(str(config.get("model_type")))
    text = config.get("text_config") or {}
    if family is None:
        return {**config, **text}
    fields = {**OMITTED.get(family, {}), **config, **text, "model_type": family}
    if _TIED in config:  # transformers ties the output layer by the config of the whole model
        fields[_TIED] = config[_TIED]
    for name in _ROPES:
        if isinstance(rope := fields.get(name), Mapping):
            fields[name] = {**rope, **{key: "default" for key in ("type", "rope_type") if rope.get(key) == "mrope"}}
    return {name: value for name, value in fields.items() if name not in _VISION_FIELDS}
