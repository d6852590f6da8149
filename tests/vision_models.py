"""Tiny vision-language models with random weights: model, tokenizer and processor, as transformers saves them."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

SIDE = 56  # pixels of a gemma3's images in each direction, which take 4 tokens
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
GEMMA_TOKENS = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
_MARKS = {"qwen": "<|vision_start|><|image_pad|><|vision_end|>", "gemma": "<start_of_image>"}

# As the published templates do it, in fewer words.
TEMPLATE = (
    "{%% for message in messages %%}<|im_start|>{{ message.role }}\n"
    "{%% if message.content is string %%}{{ message.content }}{%% else %%}{%% for part in message.content or [] %%}"
    "{%% if part.type in ('image', 'image_url') %%}%s{%% else %%}{{ part.text }}{%% endif %%}{%% endfor %%}{%% endif %%}"
    "<|im_end|>\n{%% endfor %%}{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # small weights would hide differences
    "tie_word_embeddings": False,
}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_DEEP_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 16,
    "num_position_embeddings": 16,
    "initializer_range": 0.15,
}
_DELTA_NETS = {
    "num_hidden_layers": 3,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {
        **_ROPE,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    },
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}},
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
            "window_size": 56,
            "patch_size": 14,
            "initializer_range": 0.15,
        },
    },
    "qwen3_vl": {
        "text_config": {
            **TEXT,
            "head_dim": 16,
            "rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3], "mrope_interleaved": True},
        },
        "vision_config": {**_DEEP_TOWER, "depth": 2, "deepstack_visual_indexes": [0]},
    },
    "qwen3_vl_moe": {
        "text_config": {
            **TEXT,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,  # no square matrices
            "rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3], "mrope_interleaved": True},
        },
        "vision_config": {**_DEEP_TOWER, "depth": 3, "deepstack_visual_indexes": [0, 1, 2]},  # SGLang computes three
    },
    "qwen3_5": {"text_config": {**TEXT, **_DELTA_NETS}, "vision_config": {**_DEEP_TOWER, "depth": 2}},
    "qwen3_5_moe": {
        "text_config": {
            **TEXT,
            **_DELTA_NETS,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
        "vision_config": {**_DEEP_TOWER, "depth": 2},
    },
    "gemma3": {
        "text_config": {
            **TEXT,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 12,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
            "vision_use_head": False,
        },
        "mm_tokens_per_image": 4,
    },
}


THIRD = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


def picture(width: int, height: int, seed: int = 0, form: str = "PNG") -> bytes:
    """Return an encoded picture of smooth colours, different for each seed."""
    from PIL import Image

    random = np.random.default_rng(seed)
    small = random.integers(0, 256, (4, 4, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(file, form)
    return file.getvalue()


def rewrite_as_published(family: str, directory: Path) -> None:
    """Give a model's files the experts and the names of published ones, which transformers reads but does not write."""
    from safetensors.torch import load_file, save_file

    from areal_like.backends.fsdp.checkpoint_names import PACKED_EXPERTS, TRANSPOSED

    for file in directory.glob("*.safetensors") if family in (*TRANSPOSED, "gemma3") else ():
        tower = "vision_tower."
        tensors = {name.replace(tower, f"{tower}vision_model."): tensor for name, tensor in load_file(file).items()}
        packed = [name for name in tensors if name.endswith(PACKED_EXPERTS)]
        tensors |= {name: tensors[name].transpose(1, 2).contiguous() for name in packed}
        save_file(tensors, file, {"format": "pt"})


def write_tokenizer(family: str, directory: Path) -> dict[str, int]:
    """Write a tokenizer of bytes with the family's tokens for images; return the id of each special token."""
    from areal_like.demo.tokenizers import BOS, EOS, PAD, make_tokenizer

    gemma = family == "gemma3"
    backend = make_tokenizer("bytes")
    special = (IM_START, IM_END, *(GEMMA_TOKENS if gemma else QWEN_TOKENS))
    backend.add_special_tokens(list(special))
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    named = {"boi_token": GEMMA_TOKENS[0], "eoi_token": GEMMA_TOKENS[1], "image_token": GEMMA_TOKENS[2]}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": IM_END,
        **({**named, "extra_special_tokens": named} if gemma else {}),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(TEMPLATE % _MARKS["gemma" if gemma else "qwen"])
    return {token: backend.token_to_id(token) for token in (*special, PAD, BOS, EOS)}


def write_processor(family: str, directory: Path, side: int = SIDE) -> None:
    """Write the files of transformers' processor; a gemma3's images have `side` pixels in each direction."""
    if family == "gemma3":
        image = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": side, "width": side}}
        (directory / "preprocessor_config.json").write_text(json.dumps(image | {"processor_class": "Gemma3Processor"}))
        (directory / "processor_config.json").write_text(
            json.dumps({"processor_class": "Gemma3Processor", "image_seq_length": _tokens(side)})
        )
        return
    third = family in THIRD
    patch, name = (16, "Qwen3VLProcessor") if third else (14, "Qwen2_5_VLProcessor")
    size = {"shortest_edge": (2 * patch) ** 2, "longest_edge": (8 * patch) ** 2}
    settings = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2, "processor_class": name}
    image = settings | {"image_processor_type": "Qwen2VLImageProcessorFast", "size": size}
    if third:
        image |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    else:  # as the published files have it
        image |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        del image["size"]
    (directory / "preprocessor_config.json").write_text(json.dumps(image))
    video = settings | {"video_processor_type": "Qwen3VLVideoProcessor" if third else "Qwen2VLVideoProcessor"}
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video))


def write_files(family: str, directory: Path) -> Path:
    """Write what the controller reads of a model: everything but its weights."""
    ids = write_tokenizer(family, directory)
    write_processor(family, directory)
    config: dict[str, Any] = {"model_type": family, "eos_token_id": ids[IM_END], "vision_config": {}}
    if family == "gemma3":
        config["mm_tokens_per_image"] = 4
    else:
        config["vision_config"] = {"patch_size": 16 if family in THIRD else 14, "spatial_merge_size": 2}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _vary(network: Any) -> None:
    """Change tensors of equal numbers, as biases, norms and the projector of a gemma3 are made: they hide faults."""
    import torch

    with torch.no_grad():
        for tensor in network.parameters():
            if tensor.min() == tensor.max():
                tensor.add_(torch.randn_like(tensor), alpha=0.15)


def _tokens(side: int) -> int:
    """Return how many tokens a gemma3's image takes: one for 2 x 2 patches of 14 x 14 pixels."""
    return (side // 28) ** 2


def write_vlm(family: str, directory: Path, seed: int = 0, side: int = SIDE, **text: Any) -> Any:
    """Write a model of a family with everything that it needs; return transformers' own.

    A gemma3 has images of `side` pixels in each direction.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    ids = write_tokenizer(family, directory)
    write_processor(family, directory, side)
    fields = json.loads(json.dumps(FAMILIES[family]))
    size = max(ids.values()) + 1
    ends = {"bos_token_id": ids["<bos>"], "eos_token_id": ids[IM_END], "pad_token_id": ids["<pad>"]}
    fields["text_config"] |= {"vocab_size": size, **ends, **text}
    tied = fields["text_config"]["tie_word_embeddings"]
    if family == "gemma3":
        fields["mm_tokens_per_image"], fields["vision_config"]["image_size"] = _tokens(side), side
        names = dict(zip(GEMMA_TOKENS, ("boi_token_index", "eoi_token_index", "image_token_index"), strict=True))
    else:
        names = {token: token.strip("<|>") + "_token_id" for token in QWEN_TOKENS[:2]}
        names |= {QWEN_TOKENS[2]: "image_token_id", QWEN_TOKENS[3]: "video_token_id"}
    fields |= {name: ids[token] for token, name in names.items()}
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**fields, tie_word_embeddings=tied)
    network = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    _vary(network)
    network.save_pretrained(directory)
    rewrite_as_published(network.config.model_type, directory)
    return network
