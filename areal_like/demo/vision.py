"""The vision tower of a made model, in the form of Qwen3-VL: its sizes and its tensors.

Names follow `transformers/models/qwen3_vl/modeling_qwen3_vl.py`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from areal_like.core.config.schema import InitModelConfig
from areal_like.demo.image_processor import FRAMES, MERGE, PATCH
from areal_like.demo.tokenizers import IMAGE_TOKENS

_HEAD_DIM = 32
_POSITIONS = 64  # learnt: a grid of 8 x 8, which is scaled to each image


def vision_config(shape: InitModelConfig) -> dict[str, Any]:
    """Return the sizes of the tower, `vision_config` of config.json."""
    hidden = shape.vision_hidden_size
    return {
        "model_type": "qwen3_vl",
        "depth": shape.vision_layers,
        "hidden_size": hidden,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 2 * hidden,
        "num_heads": hidden // _HEAD_DIM,
        "in_channels": 3,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": FRAMES,
        "out_hidden_size": shape.hidden_size,
        "num_position_embeddings": _POSITIONS,
        "deepstack_visual_indexes": [0],  # layers whose output is added to the first layers of the language model
    }


def with_tower(text: dict[str, Any], shape: InitModelConfig, ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the config.json of a model of text and images, whose text part has the config.json `text`.

    `ids` belong to the tokenizer's image tokens.
    """
    own = {"torch_dtype", "architectures"}
    half = shape.head_dim // 2
    across = half * 5 // 16  # of height and of width, as in Qwen3-VL; time has the rest
    rope = {"mrope_section": [half - 2 * across, across, across], "mrope_interleaved": True}
    text_config = {name: value for name, value in text.items() if name not in own}
    text_config |= {"model_type": "qwen3_vl_text", "rope_parameters": {**text["rope_parameters"], **rope}}
    ends = ("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings", "torch_dtype")
    start, end, image, video = (ids[token] for token in IMAGE_TOKENS)
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": text_config,
        "vision_config": vision_config(shape),
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "image_token_id": image,
        "video_token_id": video,
        **{name: text[name] for name in ends},
    }


def tower_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor of a tower with the `vision_config` given."""
    hidden, width, out = config["hidden_size"], config["intermediate_size"], config["out_hidden_size"]
    prefix = "model.visual."
    patch = (config["in_channels"], config["temporal_patch_size"], config["patch_size"], config["patch_size"])
    yield prefix + "patch_embed.proj.weight", (hidden, *patch)
    yield prefix + "patch_embed.proj.bias", (hidden,)
    yield prefix + "pos_embed.weight", (config["num_position_embeddings"], hidden)
    for number in range(config["depth"]):
        block = f"{prefix}blocks.{number}."
        yield from (pair for name in ("norm1", "norm2") for pair in _affine(block + name, hidden))
        yield from _affine(block + "attn.qkv", 3 * hidden, hidden)
        yield from _affine(block + "attn.proj", hidden, hidden)
        yield from _affine(block + "mlp.linear_fc1", width, hidden)
        yield from _affine(block + "mlp.linear_fc2", hidden, width)
    merged = hidden * config["spatial_merge_size"] ** 2
    deep = (f"{prefix}deepstack_merger_list.{number}." for number in range(len(config["deepstack_visual_indexes"])))
    for part, normed in ((prefix + "merger.", hidden), *((each, merged) for each in deep)):
        yield from _affine(part + "norm", normed)
        yield from _affine(part + "linear_fc1", merged, merged)
        yield from _affine(part + "linear_fc2", out, merged)


def _affine(name: str, *shape: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the weight of a layer or a norm, and its bias."""
    yield name + ".weight", shape
    yield name + ".bias", shape[:1]
