"""Tiny vision-language models in Hugging Face form, their batches, and what transformers computes for them alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trainer_jobs import VOCABULARY
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText
from vision_models import rewrite_as_published

from areal_like.core.types import Batch, Images
from areal_like.data.images import decode, draw

IMAGE, VIDEO, BEGIN, END = 5, 6, 3, 4
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
_PATCHES = {"temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
_DELTA_NETS = {
    "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
_PLAIN_TOWER = {**_TOWER, "depth": 2, "patch_size": 16, "num_position_embeddings": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
        "vision_config": {**_TOWER, "depth": 3, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
        **_TOKENS,
    },
    "qwen3_vl": {
        "text_config": {
            **_TEXT,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True,
            },
        },
        "vision_config": {
            **_TOWER, "depth": 3, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
        },
        **_TOKENS,
    },
    "qwen3_vl_moe": {
        "text_config": {
            **_TEXT,
            "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,  # no square matrices
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True,
            },
        },
        "vision_config": {
            **_TOWER, "depth": 3, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
        },
        **_TOKENS,
    },
    "qwen3_5": {"text_config": {**_TEXT, **_DELTA_NETS}, "vision_config": _PLAIN_TOWER, **_TOKENS},
    "qwen3_5_moe": {
        "text_config": {
            **_TEXT, **_DELTA_NETS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
        "vision_config": _PLAIN_TOWER,
        **_TOKENS,
    },
    "gemma3": {
        "text_config": {
            **_TEXT,
            "head_dim": 16,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 56, "patch_size": 14, "vision_use_head": False,
        },
        "mm_tokens_per_image": 4, "image_token_index": IMAGE, "boi_token_index": BEGIN, "eoi_token_index": END,
    },
}  # fmt: skip
_QWEN3_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, **_PATCHES,
    "size": {"shortest_edge": 1024, "longest_edge": 40_000},
}  # fmt: skip
_PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, **_PATCHES,
        "size": {"shortest_edge": 784, "longest_edge": 40_000},
    },
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN3_PROCESSOR),
    "gemma3": {
        "image_processor_type": "Gemma3ImageProcessor", "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "size": {"height": 56, "width": 56},
    },
}  # fmt: skip


def write_vlm(family: str, folder: Path, **text: Any) -> torch.nn.Module:
    """Write a model and its processor as transformers does; return the model, whose biases and norms are not the first
    ones; `text` are other fields of its text part."""
    torch.manual_seed(0)
    fields = {**CONFIGS[family], "text_config": {**CONFIGS[family]["text_config"], **text}}
    config = AutoConfig.for_model(family, **fields, tie_word_embeddings=family == "gemma3")
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim == 1:
                tensor.uniform_(0.5, 1.5) if "norm" in name else tensor.normal_(0, 0.2)
            elif "visual" in name or "vision" in name or "projector" in name:
                tensor.normal_(0, 0.2)  # so that an image makes a difference
    save_vlm(model, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSORS[family]))
    (folder / "tokenizer.json").write_text("{}")
    return model


def save_vlm(model: torch.nn.Module, folder: Path) -> None:
    """Write a model with the experts of published checkpoints, which transformers reads but does not write."""
    model.save_pretrained(folder)
    rewrite_as_published(model.config.model_type, folder)


def with_deepstack(folder: Path, new: Path, number: int) -> Path:
    """Copy a model's files, with another number of DeepStack layers in its config.json."""
    shutil.copytree(folder, new)
    config = json.loads((new / "config.json").read_text())
    config["vision_config"]["deepstack_visual_indexes"] = list(range(number))
    (new / "config.json").write_text(json.dumps(config))
    return new


def image_tokens(folder: Path, image: bytes) -> int:
    """Return how many tokens an image takes in a model."""
    config = AutoConfig.from_pretrained(folder)
    given = AutoImageProcessor.from_pretrained(folder)(images=[decode(image)], return_tensors="pt")
    if "image_grid_thw" not in given:
        return int(config.mm_tokens_per_image)
    return int(given["image_grid_thw"].prod()) // config.vision_config.spatial_merge_size**2


# Of each sequence, in order: words that are not trained (p), that are (r), and images by number.
_SEQUENCES = (
    "p5 i0 p4 r9",
    "p3 i0 p2 i1 p1 i2 p3 r12",
    "p6 r7",
    "p4 i1 p2 r6 p2 i3 p3 r8",  # a turn that adds an image
    "p4 i1 p2 r4",
    "i2 p1 r3",
)
SIZES = ((60, 60), (90, 40), (30, 120), (150, 100))


def vlm_batch(folder: Path, seed: int = 0) -> Batch:
    """Return sequences with none to three images of different sizes; two begin alike, each image is in several."""
    rng = np.random.default_rng(seed)
    pictures = [draw(*size, seed=number) for number, size in enumerate(SIZES)]
    words = np.setdiff1d(np.arange(VOCABULARY), [IMAGE, VIDEO])
    begin = rng.choice(words, 64)
    tokens, masks, images = [], [], []
    for sequence in _SEQUENCES:
        parts, mask, own, first = [], [], [], True
        for part in sequence.split():
            kind, number = part[0], int(part[1:])
            if kind == "i":
                own.append(pictures[number])
                parts.append(np.full(image_tokens(folder, pictures[number]), IMAGE))
            else:
                parts.append(begin[:number] if first or kind == "p" else rng.choice(words, number))
            first = first and kind != "r"
            mask.append(np.full(len(parts[-1]), kind == "r"))
        tokens.append(np.concatenate(parts))
        masks.append(np.concatenate(mask))
        images.append(tuple(own))
    total = sum(map(len, tokens))
    fields = {
        "loss_mask": np.concatenate(masks).astype(np.float32),
        "advantages": rng.normal(size=total).astype(np.float32),
        "behaviour_logprobs": np.log(rng.random(total) * 0.05).astype(np.float32),
        "on_policy": np.ones(total, np.float32),
    }
    lengths = np.array([len(each) for each in tokens], np.int32)
    return Batch(lengths, np.concatenate(tokens).astype(np.int32), fields, images=tuple(images))


def load_alone(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Return the model as transformers computes it by itself."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval()


def logits_alone(model: torch.nn.Module, folder: Path, tokens: torch.Tensor, images: Images) -> torch.Tensor:
    """Return logits of one sequence by itself, `[tokens, vocabulary]`, from what transformers' processor makes."""
    given = {}
    if images:
        processor = AutoImageProcessor.from_pretrained(folder)
        pixels = processor(images=[decode(image) for image in images], return_tensors="pt")
        given = {name: pixels[name] for name in ("pixel_values", "image_grid_thw") if name in pixels}
        kind = "token_type_ids" if model.config.model_type == "gemma3" else "mm_token_type_ids"
        given[kind] = (tokens == IMAGE).int()[None]
    return model(input_ids=tokens[None], use_cache=False, **given).logits[0]


def log_probs_alone(model: torch.nn.Module, folder: Path, batch: Batch) -> torch.Tensor:
    """Return log-probs of a batch's tokens, `[tokens]`, 0 where nothing predicts; differentiable."""
    found = []
    for number, tokens in enumerate(torch.from_numpy(batch.tokens).long().split(batch.lengths.tolist())):
        logits = logits_alone(model, folder, tokens, batch.images[number])
        said = torch.log_softmax(logits, -1)[:-1].gather(1, tokens[1:, None])[:, 0]
        found += [said.new_zeros(1), said]
    return torch.cat(found)
