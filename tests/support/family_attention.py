"""Attention on a CPU with parts that only some families have: caps on scores, sinks, and images that are seen whole.

Sinks (gpt_oss) and soft caps on scores (gemma2) need all scores. Image tokens of gemma3 see all tokens of their image,
in layers with windows too, as in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import Tensor

from areal_like.data.processor import SEES_WHOLE_IMAGES
from areal_like.rollout.sglang.patches.image_masks import image_spans
from areal_like.rollout.sglang.patches.inside.cpu_attention import BatchedTorchNativeBackend, Chunk


@dataclass(frozen=True)
class FamilyChunk(Chunk):
    """Sequences with their images; `backend` has the cap and the sinks of the layer that is computed."""

    backend: FamilyBackend
    images: Tensor | None  # [sequence, key]: number of the image that the token is a part of, -1 for words

    def seen(self, window: int | None) -> Tensor:
        """Return the mask, in which a query also sees the tokens of its image."""
        mask = super().seen(window)
        if self.images is None:
            return mask
        own = self.images.gather(1, self.positions)[..., None]
        return mask | ((own >= 0) & (own == self.images[:, None]))[:, None]

    def compute(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Return the attention, with all scores in memory where they have a cap or sinks."""
        if self.backend.is_plain:
            return super().compute(query, key, value, **options)
        return attend_by_scores(query, key, value, cap=self.backend.cap, sinks=self.backend.sinks, **options)


class FamilyBackend(BatchedTorchNativeBackend):
    """The product's attention with caps, sinks and images."""

    cap: float | None
    sinks: Tensor | None

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        self._whole_images = model_runner.model_config.hf_config.model_type in SEES_WHOLE_IMAGES

    def check(self, layer: Any) -> None:
        """Accept all layers."""

    @property
    def is_plain(self) -> bool:
        """Whether the scores of the layer have neither a cap nor sinks."""
        return self.cap is None and self.sinks is None

    def is_alone(self, chunk: Chunk) -> bool:
        return super().is_alone(chunk) and self.is_plain and chunk.images is None

    def make_chunk(self, sequences: tuple[int, ...], rows: Tensor, positions: Tensor, slots: Tensor) -> FamilyChunk:
        images = number_images([self._images[i] for i in sequences], slots) if any(self._images) else None
        return FamilyChunk(sequences, rows, positions, slots, self, images)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        prefills = self._whole_images and forward_batch.forward_mode.is_extend()
        self._images = image_spans(forward_batch.mm_inputs or ()) if prefills else []

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
        self.cap, self.sinks = layer.logit_cap or None, sinks
        return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
        self.cap, self.sinks = layer.logit_cap or None, sinks
        return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)


def attend_by_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor,
    scale: float,
    enable_gqa: bool,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return torch's attention with capped scores; each head's sink `[heads]` takes a share of them."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~attn_mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], 3)
    return scores.softmax(3)[..., : key.shape[2]] @ value


def number_images(spans: Sequence[Sequence[tuple[int, int]]], slots: Tensor) -> Tensor | None:
    """Return the number of each key's image, -1 for words, as a tensor like `slots`; None without images."""
    if not any(spans):
        return None
    images = torch.full_like(slots, -1)
    for row, own in zip(images, spans, strict=True):
        for number, (first, last) in enumerate(own):
            row[first : last + 1] = number
    return images
