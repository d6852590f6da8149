"""Loads buckets as SGLang's `load_weights` does, without its cost for each tensor.

`load_weights` maps parts of tensors to parameters in Python, about 0.1 ms for each on a slow host: longer
than the copies take, and requests wait meanwhile. It comes to the same each time. So its copies are noted at the first
update, and made all at once from then on; a model that does more than copy is loaded by SGLang each time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from areal_like.backends.transports.checksum import checksum
from areal_like.core.transfer import Layout

# Keeps the first half of a fused projection until a later bucket of the update has brought the other half.
#
# SGLang 0.5.17 joins the two down projections of latent attention (deepseek_v2 and others) in one parameter where one
# call of `load_weights` has both, and drops a half that comes alone without an error.

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


LARGE = 2**20  # bytes of a tensor that is worth a copy of its own
_ATEN = torch.ops.aten


def views(flat: Tensor, layout: Layout) -> list[tuple[str, Tensor]]:
    """Return the tensors that lie one after the other in `flat`."""
    tensors, place = [], 0
    for name, dtype, shape in layout:
        kind = getattr(torch, dtype)
        end = place + torch.Size(shape).numel() * kind.itemsize
        tensors.append((name, flat[place:end].view(kind).view(tuple(shape))))
        place = end
    return tensors


def addresses(model: Any) -> list[int]:
    """Return where a model's parameters lie."""
    each = (parameter for module in _modules(model) for parameter in module._parameters.values())
    return [parameter.data_ptr() for parameter in each if parameter is not None]


def _modules(model: Any) -> list[Any]:
    """Return a model's modules, found once: parameters are replaced, modules are not."""
    if "modules_found" not in model.__dict__:
        model.__dict__["modules_found"] = list(model.modules())
    return model.__dict__["modules_found"]


def load(model: Any, flat: Tensor, layout: Layout, where: list[int]) -> None:
    """Load the bucket `flat`, `[bytes]`, into an SGLang model; raises as its `load_weights` does.

    `where` are its `addresses` before the first bucket of an update: to ask for them takes as long as a bucket does.
    """
    if hasattr(model, "received"):  # it is watched
        model.received.update((name, checksum(tensor)) for name, tensor in views(flat, layout))
    key = tuple((name, dtype, tuple(shape)) for name, dtype, shape in layout)
    plans: dict[Any, _Plan] = model.__dict__.setdefault("plans", {})
    if (plan := plans.get(key)) and plan.addresses == where:
        plan.repeat(flat)
        return
    plan = _Plan(where)
    with _Noting(flat, plan), _threads_noted(plan):
        getattr(model.load_weights, "__wrapped__", model.load_weights)(join_halves(model, views(flat, layout)))
    if plan.can_be_repeated:
        plans[key] = plan


def renew_copies(model: Any) -> None:
    """Compute again the values that a model derived from its weights in its first pass, in place for CUDA graphs.

    The routers of GLM-4-MoE keep their weights in float32 (`sglang/srt/models/glm4_moe.py`, 0.5.17).
    """
    with torch.inference_mode():
        for module in _modules(model):
            if (copy := getattr(module, "_weight_fp32", None)) is not None:
                copy.copy_(module.weight)


class _Copy:
    """Placement of a view of a bucket, whose `place` counts numbers of its dtype, to a view of a parameter."""

    def __init__(self, target: Tensor, source: Tensor, flat: Tensor) -> None:
        self.target, self.dtype, self._size, self._strides = target, source.dtype, source.size(), source.stride()
        self._place = source.storage_offset() - flat.storage_offset() // source.itemsize
        self.alike = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
        self.is_large = self.alike and source.nbytes >= LARGE

    def source(self, numbers: Tensor) -> Tensor:
        return numbers.as_strided(self._size, self._strides, numbers.storage_offset() + self._place)


@dataclass
class _Plan:
    """Copies into a model's parameters, which have `addresses`.

    Constant fills, such as the rows of an embedding beyond the vocabulary, stay as they are.
    """

    addresses: list[int]
    copies: list[_Copy] = field(default_factory=list)
    filled: list[Tensor] = field(default_factory=list)
    more: bool = False  # was done than that

    @property
    def can_be_repeated(self) -> bool:
        copied = [_span(copy.target) for copy in self.copies]
        filled = [_span(target) for target in self.filled if target.numel()]
        return not self.more and not any(a < d and c < b for a, b in filled for c, d in copied)

    def repeat(self, flat: Tensor) -> None:
        sources = {dtype: _numbers(flat, dtype) for dtype in {copy.dtype for copy in self.copies}}
        many: dict[Any, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for copy in sorted(self.copies, key=lambda copy: not copy.is_large):
            source = copy.source(sources[copy.dtype])
            if copy.is_large:  # the device copies while the next ones are found
                copy.target.copy_(source, non_blocking=True)
            else:  # one kernel copies many that are alike, and none where one is not
                many[copy.dtype, copy.alike].append((copy.target, source))
        for pairs in many.values():
            torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))


@contextmanager
def _threads_noted(plan: _Plan) -> Iterator[None]:
    """Note that other threads do a part, which `_Noting` cannot see: it watches one thread."""
    submit = ThreadPoolExecutor.submit

    def note(self: ThreadPoolExecutor, *arguments: Any, **options: Any) -> Any:
        plan.more = True
        return submit(self, *arguments, **options)

    ThreadPoolExecutor.submit = note  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]


class _Noting(TorchDispatchMode):
    """Notes copies out of `flat` and fills in a plan, and any operation other than views."""

    def __init__(self, flat: Tensor, plan: _Plan) -> None:
        super().__init__()
        self._flat, self._plan = flat, plan

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is _ATEN.copy_.default and self._holds(args[1]):
            self._plan.copies.append(_Copy(args[0], args[1], self._flat))
        elif function in (_ATEN.fill_.Scalar, _ATEN.zero_.default):
            self._plan.filled.append(args[0])
        elif not function.is_view:
            self._plan.more = True
        return result

    def _holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self._flat.untyped_storage().data_ptr()


def _numbers(flat: Tensor, dtype: torch.dtype) -> Tensor:
    return flat[: len(flat) // dtype.itemsize * dtype.itemsize].view(dtype)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses between which a tensor lies that is not empty."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize
