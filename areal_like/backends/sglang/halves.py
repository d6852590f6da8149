"""Keeps the first half of a fused projection until a later bucket of the update has brought the other half.

SGLang 0.5.17 joins the two down projections of latent attention (deepseek_v2 and others) in one parameter where one
call of `load_weights` has both, and drops a half that comes alone without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

_FUSED, _HALVES = "fused_qkv_a_proj_with_mqa", ("q_a_proj", "kv_a_proj_with_mqa")


def join_halves(model: Any, tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return the tensors that can be loaded now: halves wait, as copies, for their other halves.

    A half that an interrupted update has left is replaced by the next update, which sends them in the same order.
    """
    if not _fuses(model):
        return list(tensors)
    kept: dict[str, Tensor] = model.__dict__.setdefault("halves", {})
    arrived = {name for name, _ in tensors}
    ready: list[tuple[str, Tensor]] = []
    for name, tensor in tensors:
        other = _other_half(name)
        if other is None or other in arrived:
            ready.append((name, tensor))
        elif other in kept:
            ready += [(other, kept.pop(other)), (name, tensor)]
        else:
            kept[name] = tensor.clone()  # the next bucket may take this one's memory
    return ready


def _fuses(model: Any) -> bool:
    if "fuses_halves" not in model.__dict__:
        model.__dict__["fuses_halves"] = any(_FUSED in name for name, _ in model.named_parameters())
    return bool(model.__dict__["fuses_halves"])


def _other_half(name: str) -> str | None:
    """Return the name of the tensor that SGLang joins with this one, None for all others."""
    parts = name.split(".")
    for half, other in (_HALVES, _HALVES[::-1]):
        if half in parts:
            return ".".join(other if part == half else part for part in parts)
    return None
