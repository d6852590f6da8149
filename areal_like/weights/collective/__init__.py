"""Weights by broadcast, and what both halves say of a tensor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSpec:
    """A Hugging Face tensor that the trainer sends; `dtype` as torch spells it without `torch.`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
