"""Write a Qwen3, Qwen3-MoE or Qwen3-VL model with random weights, and its tokenizer, in Hugging Face form.

Nothing is downloaded, and torch is not imported.

Names follow `transformers/models/qwen3*/modeling_qwen3*.py`; a test loads the result there.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize_file

from areal_like.core.config.schema import DType, InitModelConfig
from areal_like.demo.image_processor import FRAMES, MERGE, PATCH, PROCESSOR, VIDEO_PROCESSOR
from areal_like.demo.tokenizers import BOS, EOS, IMAGE_TOKENS, PAD, UNK, make_tokenizer

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


_INITIALIZER_RANGE = 0.02
_ROPE_THETA = 1_000_000.0
_EXPERTS = {"num_experts", "num_experts_per_tok", "moe_intermediate_size"}
_TOWER = {"vision_layers", "vision_hidden_size"}


def write_init_model(shape: InitModelConfig, directory: Path, *, seed: int, dtype: DType = "float32") -> None:
    """Write config.json, model.safetensors and the tokenizer into `directory`, which is made if it is missing.

    Weights are normal with standard deviation 0.02, norms are 1, as transformers initialises Qwen3.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(shape.tokenizer, images=shape.sees_images)
    config = model_config(shape, dtype)
    rng = np.random.default_rng(seed)
    weights = {name: _initial(rng, name, size, dtype) for name, size in _tensor_shapes(config)}
    _save(weights, dtype, directory / "model.safetensors")
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json", {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        **({"unk_token": UNK} if shape.tokenizer == "arithmetic" else {}),
    }
    _write_json(directory / "tokenizer_config.json", settings)
    if shape.sees_images:
        _write_json(directory / "preprocessor_config.json", PROCESSOR)
        _write_json(directory / "video_preprocessor_config.json", VIDEO_PROCESSOR)


def model_config(shape: InitModelConfig, dtype: str) -> dict[str, Any]:
    """Return the model's config.json."""
    tokenizer = make_tokenizer(shape.tokenizer, images=shape.sees_images)
    token_id = tokenizer.token_to_id
    moe = shape.num_experts is not None
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if moe else "qwen3",
        "vocab_size": shape.vocab_size or tokenizer.get_vocab_size(),
        **shape.model_dump(exclude={"tokenizer", "vocab_size", *_EXPERTS, *_TOWER}),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": _INITIALIZER_RANGE,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        # transformers 5 reads rope_parameters, mbridge and earlier versions read rope_theta
        "rope_theta": _ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": _ROPE_THETA},
        "torch_dtype": dtype,
        "pad_token_id": token_id(PAD),
        "bos_token_id": token_id(BOS),
        "eos_token_id": token_id(EOS),
    }
    if moe:
        config |= {
            **shape.model_dump(include=_EXPERTS),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.0,
        }
    if shape.sees_images:
        return with_tower(config, shape, {token: token_id(token) for token in IMAGE_TOKENS})
    return config


def _tensor_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor in the checkpoint."""
    if "vision_config" in config:
        yield from tower_shapes(config["vision_config"])
        for name, size in _tensor_shapes(config["text_config"]):
            yield name.replace("model.", "model.language_model.", 1), size
        return
    hidden, head = config["hidden_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        for part, size in (("q", query), ("k", key), ("v", key)):
            yield f"{prefix}self_attn.{part}_proj.weight", (size, hidden)
        yield prefix + "self_attn.o_proj.weight", (hidden, query)
        for part in ("q", "k"):
            yield f"{prefix}self_attn.{part}_norm.weight", (head,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        if "num_experts" not in config:
            yield from _feed_forward(prefix + "mlp.", hidden, config["intermediate_size"])
            continue
        yield prefix + "mlp.gate.weight", (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            yield from _feed_forward(prefix + f"mlp.experts.{expert}.", hidden, config["moe_intermediate_size"])
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _feed_forward(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield prefix + "gate_proj.weight", (width, hidden)
    yield prefix + "up_proj.weight", (width, hidden)
    yield prefix + "down_proj.weight", (hidden, width)


def _initial(rng: np.random.Generator, name: str, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Return a tensor's first values; bfloat16, which numpy does not have, as bits."""
    if len(shape) == 1:  # biases and norms
        values = np.full(shape, float(name.endswith("weight")), np.float32)
    else:
        values = rng.standard_normal(shape, np.float32) * np.float32(_INITIALIZER_RANGE)
    if dtype != "bfloat16":
        return values.astype(dtype, copy=False)
    bits = values.view(np.uint32)  # their upper halves, rounded to nearest, ties to even
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def _save(weights: Mapping[str, NDArray[Any]], dtype: str, file: Path) -> None:
    """Write arrays as tensors of `dtype`; `weights` stays alive meanwhile, as the addresses handed over need."""
    specs = {
        name: TensorSpec(dtype=dtype, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes)
        for name, array in weights.items()
    }
    serialize_file(specs, file, {"format": "pt"})


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
