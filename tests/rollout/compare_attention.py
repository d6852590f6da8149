"""The batched attention beside SGLang's own loop, on random caches: prints a JSON object of one Comparison per case.

A process of its own, since importing SGLang as a server does changes what others can import.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from areal_like.rollout.sglang.launcher import prepare_imports

prepare_imports(cuda=False)

from sglang.srt.layers.attention import torch_native_backend  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType  # noqa: E402

from areal_like.rollout.sglang.patches.inside import cpu_attention as sglang_cpu_attention  # noqa: E402

sys.path.append(str(Path(__file__).parents[1]))

from support.family_attention import FamilyBackend  # noqa: E402

HEAD_SIZE = 16
SLOTS = 6000
RAGGED = [1, 30, 5, 17, 2, 200, 31, 33, 64, 9, 180, 16]


@dataclass(frozen=True)
class Comparison:
    """Largest difference of the outputs, and how often each side called PyTorch's attention."""

    difference: float
    calls: int
    loop_calls: int


class Side:
    """One backend on the given cache."""

    def __init__(
        self,
        module: Any,
        backend: type,
        key: torch.Tensor,
        value: torch.Tensor,
        table: torch.Tensor,
        family: str = "llama",
    ) -> None:
        pool = SimpleNamespace(get_key_buffer=lambda layer: key[layer], get_value_buffer=lambda layer: value[layer])
        requests = SimpleNamespace(req_to_token=table)
        config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 9}
        text = SimpleNamespace(to_dict=lambda: config | {"hidden_size": 64, "intermediate_size": 64})
        whole = SimpleNamespace(hf_text_config=text, hf_config=SimpleNamespace(model_type=family))
        runner = {"model": torch.nn.Module(), "model_config": whole}
        self.backend = backend(
            SimpleNamespace(device="cpu", req_to_token_pool=requests, token_to_kv_pool=pool, **runner)
        )
        self.module, self.calls = module, 0

    def run(self, mode: str, query: torch.Tensor, layers: list[Any], batch: Any) -> torch.Tensor:
        """Outputs of a forward pass [layer, token, head * size]."""
        real = self.module.scaled_dot_product_attention

        def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
            self.calls += 1
            return real(*args, **kwargs)

        self.module.scaled_dot_product_attention = torch_native_backend.scaled_dot_product_attention = counted
        self.backend.init_forward_metadata(batch)
        forward = getattr(self.backend, f"forward_{mode}")
        try:
            return torch.stack([forward(query, None, None, layer, batch, save_kv_cache=False) for layer in layers])
        finally:
            self.module.scaled_dot_product_attention = torch_native_backend.scaled_dot_product_attention = real


def compare(
    lengths: list[int],
    extends: list[int] | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    value_size: int = HEAD_SIZE,
    cache_dtype: torch.dtype = torch.float32,
    encoders: list[int] | None = None,
    **layer_options: Any,
) -> Comparison:
    """An extend of `extends` (else a decode) of sequences of `lengths`, then, on the same objects, a decode of half."""
    torch.manual_seed(0)
    stored = [total + (encoders[i] if encoders else 0) for i, total in enumerate(lengths)]
    slots = torch.randperm(SLOTS - 1) + 1
    table = torch.zeros(len(lengths) + 3, max(stored) + 8, dtype=torch.int32)  # beyond a sequence: slot 0
    requests = torch.randperm(len(table))[: len(lengths)]
    for request, used, end in zip(requests, stored, torch.tensor(stored).cumsum(0), strict=True):
        table[request, :used] = slots[end - used : end].int()
    key = torch.randn(2, SLOTS, kv_heads, HEAD_SIZE).to(cache_dtype)
    value = torch.randn(2, SLOTS, kv_heads, value_size).to(cache_dtype)
    for cache in (key, value):  # nothing but the sequences' own slots may count
        cache[:, 0] = cache[:, slots[sum(stored) :]] = torch.nan
    options = {
        "is_cross_attention": False,
        "attn_type": AttentionType.DECODER,
        "sliding_window_size": -1,
        "logit_cap": 0.0,
    }
    layers = [
        SimpleNamespace(
            tp_q_head_num=heads, tp_k_head_num=kv_heads, qk_head_dim=HEAD_SIZE, v_head_dim=value_size,
            scaling=0.3, layer_id=i, **options | layer_options,
        )
        for i in range(2)
    ]  # fmt: skip
    sides = [
        Side(sglang_cpu_attention, sglang_cpu_attention.BatchedTorchNativeBackend, key, value, table),
        Side(torch_native_backend, torch_native_backend.TorchNativeAttnBackend, key, value, table),
    ]
    half = slice(None, None, 2)
    passes = [(lengths, extends, slice(None)), (lengths[half], None, half)]
    difference = 0.0
    for seq_lens, queries, chosen in passes:
        total, extend = torch.tensor(seq_lens), torch.tensor(queries or [1] * len(seq_lens))
        batch = SimpleNamespace(
            out_cache_loc=None, encoder_out_cache_loc=None, req_pool_indices=requests[chosen], seq_lens=total,
            extend_seq_lens=extend, extend_prefix_lens=total - extend,
            encoder_lens=torch.tensor(encoders)[chosen] if encoders else None,
        )  # fmt: skip
        query = torch.randn(int(extend.sum()), heads * HEAD_SIZE)
        ours, theirs = (side.run("extend" if queries else "decode", query, layers, batch) for side in sides)
        difference = max(difference, float((ours - theirs).abs().nan_to_num(torch.inf).max()))
    return Comparison(difference, *(side.calls for side in sides))


def compare_images(window: int) -> Comparison:
    """An extend of two prompts with images, the second from within an image on, beside a mask that is written out."""
    torch.manual_seed(0)
    lengths, extends, spans = [9, 14], [9, 4], [[(1, 4), (6, 7)], [(2, 5), (8, 11)]]
    table = torch.randperm(40)[: 2 * 16].view(2, 16).int()
    key, value = torch.randn(2, 1, 40, 2, HEAD_SIZE)
    query = torch.randn(sum(extends), 2 * HEAD_SIZE)
    layer = SimpleNamespace(
        tp_q_head_num=2, tp_k_head_num=2, qk_head_dim=HEAD_SIZE, v_head_dim=HEAD_SIZE, scaling=0.3, layer_id=0,
        is_cross_attention=False, attn_type=AttentionType.DECODER, sliding_window_size=window, logit_cap=0.0,
    )  # fmt: skip
    total, extend = torch.tensor(lengths), torch.tensor(extends)
    items = [[SimpleNamespace(offsets=[span]) for span in own] for own in spans]
    batch = SimpleNamespace(
        out_cache_loc=None, encoder_out_cache_loc=None, req_pool_indices=torch.arange(2), seq_lens=total,
        extend_seq_lens=extend, extend_prefix_lens=total - extend, encoder_lens=None,
        forward_mode=SimpleNamespace(is_extend=lambda: True), mm_inputs=[SimpleNamespace(mm_items=own) for own in items],
    )  # fmt: skip
    ours = Side(sglang_cpu_attention, FamilyBackend, key, value, table, family="gemma3")
    found = ours.run("extend", query, [layer], batch)[0].split(extends)
    difference = 0.0
    for row, (length, new, own) in enumerate(zip(lengths, extends, spans, strict=True)):
        mask = torch.ones(length, length).bool().tril().triu(-window)
        for first, last in own:
            mask[first : last + 1, first : last + 1] = True
        q, k, v = (
            x.view(-1, 2, HEAD_SIZE).transpose(0, 1)
            for x in (
                query.split(extends)[row],
                key[0, table[row, :length].long()],
                value[0, table[row, :length].long()],
            )
        )
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask[length - new :], scale=0.3)
        difference = max(difference, float((found[row] - expected.transpose(0, 1).reshape(new, -1)).abs().max()))
    return Comparison(difference, ours.calls, ours.calls)


def comparisons() -> dict[str, Comparison]:
    """Every case."""
    prefixes = [max(1, total - total // 3 * (i % 3)) for i, total in enumerate(RAGGED)]
    longer = [20] * 60 + RAGGED
    results = {
        "decode": compare(RAGGED),
        "decode, every head its own keys": compare(RAGGED, kv_heads=4),
        "decode, short values": compare(RAGGED, value_size=8),
        "decode one": compare([23]),
        "extend": compare(RAGGED, RAGGED),
        "extend, prefixes": compare(RAGGED, prefixes),
        "extend, prefixes, every head its own keys": compare(RAGGED, prefixes, kv_heads=4),
        "extend, bfloat16 cache": compare(RAGGED, prefixes, cache_dtype=torch.bfloat16),
        "extend one": compare([23], [23]),
        "extend one, prefix": compare([23], [4]),
        "extend, sliding window": compare(RAGGED, prefixes, sliding_window_size=7),
        "decode, sliding window": compare(RAGGED, sliding_window_size=7),
        "extend, not causal": compare(RAGGED, RAGGED, attn_type=AttentionType.ENCODER_ONLY),
        "left: encoder": compare(RAGGED, prefixes, encoders=[3 + i for i in range(len(RAGGED))]),
        "left: cross attention": compare(
            RAGGED, RAGGED, encoders=[total + 1 for total in RAGGED], is_cross_attention=True
        ),
        "extend, images": compare_images(100),
        "extend, images beyond a window": compare_images(2),
        "decode, unbounded": compare(longer),
        "extend, unbounded": compare(longer, longer),
    }
    sglang_cpu_attention.MOST_ELEMENTS = 20_000
    return results | {"decode, chunks": compare(longer), "extend, chunks": compare(longer, longer)}


if __name__ == "__main__":
    print(json.dumps({name: asdict(result) for name, result in comparisons().items()}))
