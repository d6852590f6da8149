"""Pictures of bright and dark fields, and the question how many are bright: rows with generated images, no files.

`count_cpu.yaml` trains on them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

FIELD = 32  # pixels of a side of a field, which is one token of a Qwen3-VL
SIDE = 2  # fields of a side of a picture
QUESTION = "<image>How many?"


def train() -> list[dict[str, Any]]:
    """Return the pictures of the training."""
    return [row(seed) for seed in range(1024)]


def test() -> list[dict[str, Any]]:
    """Return other pictures."""
    return [row(seed) for seed in range(10_000, 10_200)]


def row(seed: int) -> dict[str, Any]:
    """Return one picture with its question and the answer, in which all numbers are equally frequent."""
    random = np.random.default_rng(seed)
    count = int(random.integers(0, SIDE**2 + 1))
    bright = np.zeros(SIDE**2, bool)
    bright[random.permutation(SIDE**2)[:count]] = True
    low, high = np.where(bright, 170, 0)[:, None], np.where(bright, 256, 80)[:, None]
    colours = random.integers(low, high, (SIDE**2, 3)).astype(np.uint8).reshape(SIDE, SIDE, 3)
    picture = Image.fromarray(colours.repeat(FIELD, axis=0).repeat(FIELD, axis=1))
    return {"question": QUESTION, "images": picture, "answer": str(count)}


def reward(response: str, row: dict[str, Any]) -> float:
    """Return whether the response is the number."""
    return float(response.strip() == row["answer"])
