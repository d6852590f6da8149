"""Keeps the KV cache of a paused server's requests in host memory while others use the GPU's.

SGLang 0.5.17 releases the memory of an idle server alone. Under a pause `in_place` requests hold slots of the cache:
the assignment stays as it is, and the slots' contents are copied out and in again. Under a pause `retract`, and where
nothing runs, no request holds any, so the cache is emptied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_HELP = "write weight_update.requests=recompute"
ROWS = 8192  # slots that are copied at once; torch keeps the pinned memory of these for the next time


def keep(scheduler: Any) -> Callable[[], None] | None:
    """Copy all slots that requests hold, and their assignment; return the function that restores them.

    None where no request holds any; the cache is empty then. Raises NotImplementedError for a cache of other attention
    than plain or latent.
    """
    waiting, scheduler.waiting_queue = scheduler.waiting_queue, []  # waiting requests hold no slot
    try:
        if scheduler.flush_cache():
            return None
    finally:
        scheduler.waiting_queue = waiting
    allocator, table = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool.req_to_token
    buffers = _buffers(allocator)
    _drop_what_nobody_holds(scheduler.tree_cache)
    slots = _hold(allocator)
    parts = [(buffer, rows) for buffer in buffers for rows in slots.split(ROWS)]
    kept = [_to_host(buffer[rows], ROWS) for buffer, rows in parts]
    places = _to_host(table, len(table))
    _synchronize(table)
    if table.is_cuda:
        torch.cuda.empty_cache()  # memory of passes, which `flush_cache` frees elsewhere

    def bring_back() -> None:
        for (buffer, rows), host in zip(parts, kept, strict=True):
            buffer[rows] = host.to(buffer.device, non_blocking=True)
        table.copy_(places, non_blocking=True)
        _synchronize(table)

    return bring_back


def _drop_what_nobody_holds(tree: Any) -> None:
    """Empty the cache except for slots of running requests: after the pause all prefixes have older weights."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    tree.evict(EvictParams(num_tokens=tree.evictable_size()))


def _hold(allocator: Any) -> Tensor:
    """Return the slots that are not free, `[slots]`."""
    free = getattr(allocator, "free_pages", None)
    if type(allocator).__name__ not in ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator") or free is None:
        raise NotImplementedError(f"SGLang's allocator cannot release the memory of waiting requests; {_HELP}")
    size = allocator.page_size
    taken = torch.ones(allocator.size // size + 1, dtype=torch.bool, device=free.device)
    taken[0] = False  # the page that padding is written to
    taken[torch.cat([free, allocator.release_pages]).long()] = False
    first = taken.nonzero().flatten() * size
    return (first[:, None] + torch.arange(size, device=free.device)).flatten()


def _buffers(allocator: Any) -> list[Tensor]:
    """Return keys and values of every layer, or the latent vectors that stand for both, `[slots, ...]`."""
    cache = allocator.get_kvcache()
    found = [buffer for name in ("k_buffer", "v_buffer", "kv_buffer") for buffer in getattr(cache, name, None) or ()]
    if not found or any(len(buffer) != allocator.size + allocator.page_size for buffer in found):
        raise NotImplementedError(f"SGLang's KV cache cannot release the memory of waiting requests; {_HELP}")
    return found


def _to_host(tensor: Tensor, rows: int) -> Tensor:
    """Return a copy on the host, in memory for `rows` rows; complete once the device is synchronized."""
    host = torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=tensor.is_cuda)[: len(tensor)]
    return host.copy_(tensor, non_blocking=True)


def _synchronize(tensor: Tensor) -> None:
    torch.get_device_module(tensor.device).synchronize()


@contextmanager
def as_if_idle(updater: Any) -> Iterator[None]:
    """Let SGLang's updater release memory although requests wait or run: the caller has saved their slots.

    It unmaps memory at once, which kernels of any stream may still read, so the device finishes before.
    """
    torch.get_device_module(updater.scheduler.device).synchronize()
    idle, flush = updater.is_fully_idle, updater.flush_cache
    updater.is_fully_idle = updater.flush_cache = lambda *_, **__: True
    try:
        yield
    finally:
        updater.is_fully_idle, updater.flush_cache = idle, flush


def updater_with_requests() -> type:
    """Return SGLang's weight updater, which can release memory while requests wait, and keeps their slots."""
    from sglang.srt.managers import scheduler

    class UpdaterWithRequests(scheduler.SchedulerWeightUpdaterManager):  # type: ignore[misc,name-defined]
        bring_back: Any = None  # of `keep`, while the memory is released

        def release_memory_occupation(self, request: Any) -> Any:
            if "kv_cache" in request.tags:
                self.bring_back = keep(self.scheduler)
            with as_if_idle(self):
                return super().release_memory_occupation(request)

        def resume_memory_occupation(self, request: Any) -> Any:
            answer = super().resume_memory_occupation(request)
            if "kv_cache" in request.tags and self.bring_back:
                self.bring_back()
                self.bring_back = None
            return answer

    return UpdaterWithRequests
