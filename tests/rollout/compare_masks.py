"""Print how far SGLang's Triton kernels with masks of images are from PyTorch's attention, in Triton's interpreter.

Run by `test_image_masks.py` in a process of its own, which has to set TRITON_INTERPRET before its start.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from triton.runtime import interpreter

from areal_like.rollout.sglang.launcher import prepare_imports

prepare_imports(cuda=False)

from sglang.kernels.ops.attention import extend_attention  # noqa: E402

from areal_like.rollout.sglang.patches.image_masks import add_masks, wrap_kernel  # noqa: E402

SIZE, HEADS, KV_HEADS, SLOTS, SCALE, WINDOW = 16, 2, 1, 256, 0.3, 9
# Of each sequence: all tokens, those of this pass, and its images, of which one is cached in part
SEQUENCES = ((100, 100, [(5, 84), (90, 96)]), (60, 30, [(20, 49)]), (20, 20, []))


def repair_interpreter() -> None:
    """Have Triton's interpreter take an array of one number for a number, which numpy no longer does."""
    patch = interpreter._patch_lang_tensor

    def patch_with_numbers(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_numbers


class Pass:
    """A prefill of the sequences: its queries, its cache, and what SGLang passes to the kernels."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        lengths, new, _ = zip(*SEQUENCES, strict=True)
        self.query = torch.randn(sum(new), HEADS, SIZE)
        self.key, self.value = torch.randn(2, SLOTS, KV_HEADS, SIZE)
        self.slots = torch.randperm(SLOTS)[: sum(lengths)].split(lengths)
        self.new = torch.tensor(new, dtype=torch.int32)
        prefixes = torch.tensor(lengths, dtype=torch.int32) - self.new
        cached = [own[:prefix] for own, prefix in zip(self.slots, prefixes.tolist(), strict=True)]
        self.own = torch.cat([own[prefix:] for own, prefix in zip(self.slots, prefixes.tolist(), strict=True)])
        self.ends = torch.tensor([0, *self.new.cumsum(0).tolist()])
        self.longest = max(new)
        self.found = SimpleNamespace(
            kv_indptr=torch.tensor([0, *prefixes.cumsum(0).tolist()], dtype=torch.int32), kv_indices=torch.cat(cached),
            window_kv_indptr=None, window_kv_indices=torch.tensor([0]), custom_mask=None, mask_indptr=None,
        )  # fmt: skip
        items = [[SimpleNamespace(offsets=[span]) for span in images] for *_, images in SEQUENCES]
        inputs = [SimpleNamespace(mm_items=own) if own else None for own in items]
        self.backend = SimpleNamespace(forward_metadata=self.found, sliding_window_size=WINDOW)
        batch = SimpleNamespace(extend_seq_lens=self.new, extend_prefix_lens=prefixes, mm_inputs=inputs)
        add_masks(self.backend, batch)

    def expected(self, window: int) -> torch.Tensor:
        """Return attention with masks that are written out."""
        results = []
        for query, slots, (length, new, images) in zip(
            self.query.split(self.new.tolist()), self.slots, SEQUENCES, strict=True
        ):
            mask = torch.ones(length, length).bool().tril().triu(-window if window > 0 else -length)
            for first, last in images:
                mask[first : last + 1, first : last + 1] = True
            key, value = (cache[slots].transpose(0, 1) for cache in (self.key, self.value))
            found = scaled_dot_product_attention(
                query.transpose(0, 1), key, value, mask[length - new :], scale=SCALE, enable_gqa=True
            )
            results.append(found.transpose(0, 1))
        return torch.cat(results)

    def in_two_stages(self, window: int, *, ours: bool = True) -> torch.Tensor:
        """Return the results of the kernel for the cache and the new tokens apart, as SGLang calls it."""
        kernel, result, found = extend_attention.extend_attention_fwd, torch.zeros_like(self.query), self.found
        (wrap_kernel(kernel, self.backend) if ours else kernel)(
            self.query, self.key[self.own], self.value[self.own], result, self.key, self.value, self.ends,
            found.kv_indptr, found.kv_indices, found.custom_mask, True, found.mask_indptr, self.longest, 1.0, 1.0, SCALE,
            logit_cap=0.0, sliding_window_size=window, window_kv_offsets=torch.zeros_like(self.new), page_size=1,
        )  # fmt: skip
        return result

    def unified(self, window: int) -> torch.Tensor:
        """Return the results of the kernel of deterministic inference, as SGLang calls it."""
        result, found, count = torch.zeros_like(self.query), self.found, len(SEQUENCES)
        ends, slots, prefixes = extend_attention.build_unified_kv_indices(
            found.kv_indptr, found.kv_indices, self.ends[:-1].int(), self.new, self.own, count
        )
        wrap_kernel(extend_attention.extend_attention_fwd_unified, self.backend)(
            self.query, result, self.key, self.value, 1.0, 1.0, self.ends, ends, slots, prefixes.int(), self.longest,
            custom_mask=found.custom_mask, mask_indptr=found.mask_indptr, sm_scale=SCALE, logit_cap=0.0, is_causal=True,
            sliding_window_size=window, window_start_pos=torch.zeros_like(self.new), page_size=1,
        )  # fmt: skip
        return result


def main() -> None:
    repair_interpreter()
    prefill = Pass()
    results = {}
    for window in (-1, WINDOW):
        expected = prefill.expected(window)
        for kernel in (prefill.in_two_stages, prefill.unified):
            results[f"{kernel.__name__}, window {window}"] = float((kernel(window) - expected).abs().max())
    apart = prefill.in_two_stages(-1, ours=False) - prefill.expected(-1)
    print(json.dumps({"ours": results, "sglang": float(apart.abs().max())}))


if __name__ == "__main__":
    main()
