"""A critic's head: one value per token, in place of a language model's output layer.

In a checkpoint it is `score.weight`, `[1, hidden]`, float32, as in transformers' sequence classifiers with one label:
`AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)` loads it. A checkpoint without it gets a new
head.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

HEAD_NAME = "score.weight"


def new_head(hidden_size: int, seed: int) -> Tensor:
    """Return a new head: small, so that first values are near 0, and the same in every layout and backend."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, hidden_size, generator=generator) / (hidden_size + 1)


def stored_head(path: Path) -> Tensor | None:
    """Return the head of a checkpoint directory, if it has one."""
    file, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if index.is_file():
        shard = json.loads(index.read_text())["weight_map"].get(HEAD_NAME)
        if shard is None:
            return None
        file = path / shard
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(HEAD_NAME).float() if HEAD_NAME in tensors.keys() else None  # noqa: SIM118
