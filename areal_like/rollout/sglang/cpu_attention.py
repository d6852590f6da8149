"""SGLang's ``torch_native`` attention in a few calls for many sequences, where its own loop makes one call for each.

With hundreds of short sequences that loop is most of a small model's time on a CPU. Here sequences of similar lengths
are padded to one size and share a call. Whatever is not causal self-attention (encoders, cross attention) is left to
SGLang's loop, and so is a long prompt: alone it costs no less than in company.

SGLang's models of mistral, qwen2, qwen3 and others do not pass on their sliding windows; here each layer gets its own.
Sinks (gpt_oss) and soft caps on scores (gemma2), of which SGLang's loop knows nothing, are computed with all scores.
Image tokens of gemma3 see all tokens of their image, in layers with windows too, as in transformers.

The counterpart is ``sglang/srt/layers/attention/torch_native_backend.py`` of SGLang 0.5.17.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import batched, groupby
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from allocation.model_spec import sliding_layers
from areal_like.data.processor import SEES_WHOLE_IMAGES
from areal_like.rollout.sglang.image_masks import image_spans

MOST_ELEMENTS = 2**19  # that one call for several sequences gathers: 2 MiB of float32 stay in a core's cache


@dataclass(frozen=True)
class Chunk:
    """Sequences that share a call, each padded by repeating its last token.

    So the padding holds the sequence's own, finite keys and values, and a padded query repeats a result.
    """

    sequences: tuple[int, ...]
    queries: Tensor  # [sequence, query]: row of the batch's tokens
    positions: Tensor  # [sequence, query]: place in the sequence
    slots: Tensor  # [sequence, key]: row of the KV cache
    images: Tensor | None = None  # [sequence, key]: number of the image that the token is a part of, -1 for words

    @cached_property
    def mask(self) -> Tensor:
        """Whether the query sees the key: [sequence, 1, query, key]."""
        return (torch.arange(self.slots.shape[1]) <= self.positions[..., None])[:, None]

    def seen(self, window: int | None) -> Tensor:
        """Return the mask where a query sees itself, its image and the `window` tokens before, None: all before."""
        mask = self.mask
        if window is not None:
            mask = mask & (torch.arange(self.slots.shape[1]) >= self.positions[..., None] - window)[:, None]
        if self.images is None:
            return mask
        own = self.images.gather(1, self.positions)[..., None]
        return mask | ((own >= 0) & (own == self.images[:, None]))[:, None]

    def attend(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scores: Mapping[str, Any],
        **options: Any,
    ) -> None:
        """Write the attention's `output` [token, head, size] for this chunk's rows of `query` [token, head, size].

        `scores` are the layer's cap and sinks.
        """
        keys, values = (cache[self.slots].transpose(1, 2).to(query.dtype) for cache in (k_cache, v_cache))
        attention = partial(attend_by_scores, **scores) if any(x is not None for x in scores.values()) else None
        result = (attention or scaled_dot_product_attention)(
            query[self.queries].transpose(1, 2),
            keys,
            values,
            attn_mask=self.seen(options["sliding_window_size"]),
            scale=options["scaling"],
            enable_gqa=options["enable_gqa"],
        )
        output[self.queries] = result.transpose(1, 2)


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
    """Return torch's attention with capped scores, of which each head's sink `[heads]` takes a share."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~attn_mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], 3)
    return scores.softmax(3)[..., : key.shape[2]] @ value


def similar_sequences(lengths: list[tuple[int, int]], query_size: int, token_size: int) -> Iterator[tuple[int, ...]]:
    """Return groups of sequences, (queries, keys) within a factor of two; padded, they have at most MOST_ELEMENTS.

    `query_size` and `token_size` are the elements of one query and of one token's key and value.
    """

    def size(sequence: int) -> tuple[int, int]:
        queries, keys = lengths[sequence]
        return queries.bit_length(), (keys // 32).bit_length()  # up to 32 keys cost less than a call

    for _, similar in groupby(sorted(range(len(lengths)), key=size), size):
        group = list(similar)
        queries, keys = (max(column) for column in zip(*(lengths[i] for i in group), strict=True))
        elements = queries * (query_size + keys) + keys * token_size
        yield from batched(group, max(1, MOST_ELEMENTS // elements))


def number_images(spans: Sequence[Sequence[tuple[int, int]]], slots: Tensor) -> Tensor | None:
    """Return the number of each key's image, -1 for words, as a tensor like `slots`; None without images."""
    if not any(spans):
        return None
    images = torch.full_like(slots, -1)
    for row, own in zip(images, spans, strict=True):
        for number, (first, last) in enumerate(own):
            row[first : last + 1] = number
    return images


class BatchedTorchNativeBackend(TorchNativeAttnBackend):
    """TorchNativeAttnBackend with the same results to rounding; arguments of the overridden methods are as there."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        config = model_runner.model_config.hf_text_config.to_dict()
        sliding = sliding_layers(config)
        self._whole_images = model_runner.model_config.hf_config.model_type in SEES_WHOLE_IMAGES
        for layer in model_runner.model.modules():
            if isinstance(layer, RadixAttention) and layer.layer_id in sliding:
                layer.sliding_window_size = config["sliding_window"] - 1  # tokens before the query

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self.forward_metadata: list[Chunk] | None = None  # made by the first layer of the pass, the same for all
        prefills = self._whole_images and forward_batch.forward_mode.is_extend()
        self._images = image_spans(forward_batch.mm_inputs or ()) if prefills else []

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
        self._scores = {"cap": layer.logit_cap or None, "sinks": sinks}
        return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
        self._scores = {"cap": layer.logit_cap or None, "sinks": sinks}
        return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)

    def _run_sdpa_forward_extend(
        self, query, output, k_cache, v_cache, table, requests, seq_lens, prefixes, extends, encoders=None, **options
    ):
        loop, caches = super()._run_sdpa_forward_extend, (k_cache, v_cache)
        if not (options["causal"] and _is_self_attention(encoders, options)):
            return loop(query, output, *caches, table, requests, seq_lens, prefixes, extends, encoders, **options)
        for chunk in self._chunks(query, *caches, table, requests, seq_lens, extends):
            plain = chunk.images is None and all(part is None for part in self._scores.values())
            if len(chunk.sequences) > 1 or not plain:
                chunk.attend(query, output, *caches, self._scores, **options)
                continue
            rows = slice(chunk.queries[0, 0], chunk.queries[0, -1] + 1)
            one = (batch[chunk.sequences[0], None] for batch in (requests, seq_lens, prefixes, extends))
            loop(query[rows], output[rows], *caches, table, *one, **options)
        return output

    def _run_sdpa_forward_decode(
        self, query, output, k_cache, v_cache, table, requests, seq_lens, encoders=None, **options
    ):
        if not _is_self_attention(encoders, options):
            loop = super()._run_sdpa_forward_decode
            return loop(query, output, k_cache, v_cache, table, requests, seq_lens, encoders, **options)
        for chunk in self._chunks(query, k_cache, v_cache, table, requests, seq_lens, torch.ones_like(seq_lens)):
            chunk.attend(query, output, k_cache, v_cache, self._scores, **options)
        return output

    def _chunks(self, query, k_cache, v_cache, table, requests, seq_lens, extends) -> list[Chunk]:
        if self.forward_metadata is None:
            token_size = k_cache[0].numel() + v_cache[0].numel()
            lengths = list(zip(extends.tolist(), seq_lens.tolist(), strict=True))
            starts = extends.cumsum(0) - extends
            self.forward_metadata = []
            for sequences in similar_sequences(lengths, query[0].numel(), token_size):
                chosen = torch.tensor(sequences)
                extend, total = extends[chosen, None], seq_lens[chosen, None]
                place = torch.arange(int(extend.max())).minimum(extend - 1)
                key = torch.arange(int(total.max())).minimum(total - 1)
                slots = table[requests[chosen, None], key].long()
                images = number_images([self._images[i] for i in sequences], slots) if any(self._images) else None
                rows, positions = starts[chosen, None] + place, total - extend + place
                self.forward_metadata.append(Chunk(sequences, rows, positions, slots, images))
        return self.forward_metadata


def _is_self_attention(encoders: Tensor | None, options: dict[str, Any]) -> bool:
    """Return whether queries see tokens of their own sequence alone, up to themselves."""
    return encoders is None and not options["is_cross_attn"]
