"""Masks of Triton attention for models whose image tokens attend to all tokens of their image, also later ones.

SGLang 0.5.17 makes a mask for such a prefill (`sglang/srt/models/gemma3_mm.py`), but

- its kernel skips keys behind a block of 64 or 128 queries, which cuts every longer image;
- layers with sliding windows hide tokens of images that are longer than the window, unlike in transformers;
- an image of which the cache holds the beginning gets a causal mask;
- the server ends at a prefill of requests with images and requests without.

Here the mask is that of transformers, of a layer with a window too, and the kernel sees all keys. Only prefills of
images take it. A generated token sees all tokens before it, so decoding and its CUDA graphs stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from areal_like.data.processor import SEES_WHOLE_IMAGES
from areal_like.rollout.sglang.architectures import read_fields
from areal_like.rollout.sglang.patch import Launch, Patch

if TYPE_CHECKING:
    from torch import Tensor

# No pass may end within an image, and a captured prefill would keep the mask that it was captured with
_ARGUMENTS = ("--enable-multimodal", "--chunked-prefill-size", "-1", "--disable-prefill-cuda-graph")
_ATTENTION = "--attention-backend"
_KERNELS = ("extend_attention_fwd", "extend_attention_fwd_unified")  # the second serves deterministic inference


def image_arguments(launch: Launch) -> Sequence[str]:
    """Return a GPU server's further arguments for such a model: Triton's attention alone has masks."""
    if not launch.cuda or read_fields(launch.arguments).get("model_type") not in SEES_WHOLE_IMAGES:
        return ()
    return [*_ARGUMENTS, *(() if _ATTENTION in launch.arguments else (_ATTENTION, "triton"))]


def image_spans(inputs: Sequence[Any]) -> list[list[tuple[int, int]]]:
    """Return the first and last tokens of the images of each request."""
    return [[span for item in own.mm_items for span in item.offsets] if own else [] for own in inputs]


def draw_masks(
    new: int, prefix: int, images: Sequence[tuple[int, int]], window: int, device: Any = None
) -> tuple[Tensor, Tensor]:
    """Return which keys `new` tokens after a `prefix` see, in layers without and with a window: [new, prefix + new].

    A window is the number of tokens before the current one.
    """
    import torch

    queries = torch.arange(prefix, prefix + new, device=device)[:, None]
    keys = torch.arange(prefix + new, device=device)
    whole = keys <= queries
    near = whole & (keys >= queries - window)
    for first, last in images:
        for mask in (whole, near):
            mask[max(first - prefix, 0) : max(last + 1 - prefix, 0), first : last + 1] = True
    return whole, near


def add_masks(backend: Any, batch: Any) -> None:
    """Give the attention of a prefill its masks, and its layers with windows all keys, from which they select."""
    import torch

    lengths, prefixes = batch.extend_seq_lens.tolist(), batch.extend_prefix_lens.tolist()
    images, device = image_spans(batch.mm_inputs), batch.extend_seq_lens.device
    window = backend.sliding_window_size
    drawn = [
        draw_masks(new, prefix, spans, window if window and window > 0 else prefix + new, device)
        for new, prefix, spans in zip(lengths, prefixes, images, strict=True)
    ]
    ends = accumulate((whole.numel() for whole, _ in drawn), initial=0)
    whole, near = (torch.cat([mask.flatten() for mask in masks]) for masks in zip(*drawn, strict=True))
    found = backend.forward_metadata
    found.custom_mask, found.windowed_mask = whole, near
    found.mask_indptr = torch.tensor(list(ends), dtype=torch.int64, device=device)
    if found.window_kv_indices is not None:
        found.window_kv_indptr, found.window_kv_indices = found.kv_indptr, found.kv_indices


def wrap_kernel(kernel: Callable[..., None], backend: Any) -> Callable[..., None]:
    """Return a kernel that takes the masks of the `backend`'s pass, if it has any, for all that a token may see."""
    names = signature(kernel)

    @wraps(kernel)
    def attend(*arguments: Any, **named: Any) -> None:
        near = getattr(backend.forward_metadata, "windowed_mask", None)
        if near is None:
            kernel(*arguments, **named)
            return
        given = dict(names.bind(*arguments, **named).arguments)
        if given["sliding_window_size"] > 0:
            given["custom_mask"] = near
        given |= {"sliding_window_size": -1, "is_causal": False}
        if "skip_prefix_custom_mask" in names.parameters:
            given["skip_prefix_custom_mask"] = False
        kernel(**given)

    return attend


def see_whole_images(launch: Launch) -> None:
    """Compute gemma3's image tokens with these masks."""
    if not launch.cuda or "Gemma3ForConditionalGeneration" not in launch.architectures:
        return
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.model_executor.forward_context import get_attn_backend
    from sglang.srt.models.gemma3_mm import Gemma3ForConditionalGeneration

    build = TritonAttnBackend.__init__

    @wraps(build)
    def build_with_masks(self: Any, *arguments: Any, **named: Any) -> None:
        build(self, *arguments, **named)
        for name in _KERNELS:
            setattr(self, name, wrap_kernel(getattr(self, name), self))

    TritonAttnBackend.__init__ = build_with_masks
    Gemma3ForConditionalGeneration.prepare_attn_masks = lambda self, batch, *_, **__: add_masks(
        get_attn_backend(), batch
    )


PATCH = Patch(prepare=image_arguments, schedule=see_whole_images)
