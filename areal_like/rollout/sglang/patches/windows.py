"""Sliding windows as in transformers: SGLang 0.5.17 leaves out their oldest token when Triton attention decodes.

Upstream: https://github.com/sgl-project/sglang/pull/32087
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from areal_like.rollout.sglang.patch import Patch


def complete_windows() -> None:
    """Include the oldest token of a sliding window when Triton attention decodes, as in a prefill.

    A model's `sliding_window_size` is the number of tokens before the current one. Buffers of decoding steps hold so
    many tokens, the current one included.
    """
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    for name in ("init_cuda_graph_state", "_update_decode_kv_buffers"):
        setattr(TritonAttnBackend, name, _with_current_token(getattr(TritonAttnBackend, name)))
    for name in ("init_forward_metadata", "_translate_cuda_graph_shared_pool_locs"):
        setattr(TritonAttnBackend, name, _with_current_token(getattr(TritonAttnBackend, name), _decodes))


def _decodes(batch: Any, *_: Any, **__: Any) -> bool:
    decodes: bool = batch.forward_mode.is_decode_or_idle()
    return decodes


def _with_current_token(method: Callable[..., Any], applies: Callable[..., bool] | None = None) -> Callable[..., Any]:
    """Return a method that finds a window of one token more in its attention backend, where that applies."""

    @wraps(method)
    def call_with_current_token(self: Any, *arguments: Any, **named: Any) -> Any:
        before = self.sliding_window_size
        if before is None or before <= 0 or (applies and not applies(*arguments, **named)):
            return method(self, *arguments, **named)
        self.sliding_window_size = before + 1
        try:
            return method(self, *arguments, **named)
        finally:
            self.sliding_window_size = before

    return call_with_current_token


PATCH = Patch(schedule=lambda launch: complete_windows() if launch.cuda else None)
