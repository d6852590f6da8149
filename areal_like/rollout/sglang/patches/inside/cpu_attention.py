"""SGLang's ``torch_native`` attention in a few calls for many sequences, where its own loop makes one call for each.

With hundreds of short sequences that loop is most of a small model's time on a CPU. Here sequences of similar lengths
are padded to one size and share a call. SGLang's loop computes all attention but causal self-attention (encoders, cross
attention), and a prompt whose length no other sequence has.

SGLang's models of mistral, qwen2, qwen3 and others do not pass on their sliding windows; here each layer gets its own.

The counterpart is ``sglang/srt/layers/attention/torch_native_backend.py`` of SGLang 0.5.17.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
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

ATTENTION = "torch_native"
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

    @cached_property
    def mask(self) -> Tensor:
        """Whether the query sees the key: [sequence, 1, query, key]."""
        return (torch.arange(self.slots.shape[1]) <= self.positions[..., None])[:, None]

    def seen(self, window: int | None) -> Tensor:
        """Return the mask where a query sees itself and the `window` tokens before, None: all before."""
        if window is None:
            return self.mask
        return self.mask & (torch.arange(self.slots.shape[1]) >= self.positions[..., None] - window)[:, None]

    def attend(self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any) -> None:
        """Write the attention's `output` [token, head, size] for this chunk's rows of `query` [token, head, size]."""
        keys, values = (cache[self.slots].transpose(1, 2).to(query.dtype) for cache in (k_cache, v_cache))
        result = self.compute(
            query[self.queries].transpose(1, 2),
            keys,
            values,
            attn_mask=self.seen(options["sliding_window_size"]),
            scale=options["scaling"],
            enable_gqa=options["enable_gqa"],
        )
        output[self.queries] = result.transpose(1, 2)

    def compute(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Return the attention of the chunk's `query` [sequence, head, query, size]."""
        return scaled_dot_product_attention(query, key, value, **options)


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


class BatchedTorchNativeBackend(TorchNativeAttnBackend):
    """TorchNativeAttnBackend with the same results to rounding; arguments of the overridden methods are as there."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        config = model_runner.model_config.hf_text_config.to_dict()
        sliding = sliding_layers(config)
        for layer in model_runner.model.modules():
            if isinstance(layer, RadixAttention):
                self.check(layer)
            if isinstance(layer, RadixAttention) and layer.layer_id in sliding:
                layer.sliding_window_size = config["sliding_window"] - 1  # tokens before the query

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self.forward_metadata: list[Chunk] | None = None  # made by the first layer of the pass, the same for all

    def check(self, layer: RadixAttention) -> None:
        """Raise NotImplementedError for a layer with a cap on its scores, which the loop would leave out."""
        if layer.logit_cap:
            raise NotImplementedError("SGLang's attention on a CPU has no cap on scores (attn_logit_softcapping)")

    def is_alone(self, chunk: Chunk) -> bool:
        """Return whether SGLang's loop computes a chunk of a prefill."""
        return len(chunk.sequences) == 1

    def make_chunk(self, *parts: Any) -> Chunk:
        return Chunk(*parts)

    def _run_sdpa_forward_extend(
        self, query, output, k_cache, v_cache, table, requests, seq_lens, prefixes, extends, encoders=None, **options
    ):
        loop, caches = super()._run_sdpa_forward_extend, (k_cache, v_cache)
        if not (options["causal"] and _is_self_attention(encoders, options)):
            return loop(query, output, *caches, table, requests, seq_lens, prefixes, extends, encoders, **options)
        for chunk in self._chunks(query, *caches, table, requests, seq_lens, extends):
            if not self.is_alone(chunk):
                chunk.attend(query, output, *caches, **options)
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
            chunk.attend(query, output, k_cache, v_cache, **options)
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
                rows, positions = starts[chosen, None] + place, total - extend + place
                self.forward_metadata.append(self.make_chunk(sequences, rows, positions, slots))
        return self.forward_metadata


def _is_self_attention(encoders: Tensor | None, options: dict[str, Any]) -> bool:
    """Return whether queries see tokens of their own sequence alone, up to themselves."""
    return encoders is None and not options["is_cross_attn"]
