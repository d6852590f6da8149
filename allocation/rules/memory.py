"""Rules that need the GPU's memory size: every engine fits, alone or together with engines on the same GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from allocation.backends import SERVER
from allocation.diagnostics import Problem, Remedy, Severity
from allocation.hardware import GIB
from allocation.placement import Planned
from allocation.registry import rule
from allocation.settings import Workload

if TYPE_CHECKING:
    from allocation.memory import Footprint

_SOURCE = "allocation/memory/; docs/memory_and_planning.md lists its errors"
# Above this share of a GPU the estimate's own error decides whether it fits.
TIGHT = 0.92


@rule("ALLOC-MEMORY", source=_SOURCE)
def memory_suffices(planned: Sequence[Planned]) -> Iterator[Problem]:
    """The peak memory of an engine, by the memory model's estimate, fits on a GPU together with the memory of the
    engines that share the GPU."""
    for group in _sharing(planned):
        size, room = _size(group)
        if size > room:
            source = group[0].engine.source
            spans = [span for one in group if one.engine.source == source for span in one.engine.spans()]
            message = f"{_names(group)} {size / GIB:.1f} GiB on a GPU of {room / GIB:.1f} GiB: {_breakdown(group)}"
            roles, remedy = tuple(one.engine.role for one in group), _fitting_option(group)
            yield Problem(message, tuple(dict.fromkeys(spans)), source=source, remedy=remedy, roles=roles)


@rule("ALLOC-MEMORY-TIGHT", source=_SOURCE, severity=Severity.WARNING)
def memory_is_ample(planned: Sequence[Planned]) -> Iterator[Problem]:
    """The estimate is off by some percent, so an engine that nearly fills its GPU may not fit."""
    for group in _sharing(planned):
        size, room = _size(group)
        if TIGHT * room < size <= room and any(one.plan.kind != SERVER for one in group):
            message = f"{_names(group)} {size / GIB:.1f} of a GPU's {room / GIB:.1f} GiB, which may be too close"
            yield Problem(message, group[0].engine.spans(), source=group[0].engine.source)


@rule("ALLOC-MEMORY-KV", source=_SOURCE)
def cache_holds_a_sequence(planned: Sequence[Planned]) -> Iterator[Problem]:
    """A server needs memory beside the weights for the longest sequence in its KV cache."""
    for one in planned:
        longest = (one.work.batch.max_length if one.work.batch else None) or 1
        room = _footprint(one).kv_tokens
        if room is not None and room < longest:
            share = one.work.memory.mem_fraction_static
            message = (
                f"the server's share of a GPU ({share:g}) holds, beside the weights, {room:,} tokens of KV cache; "
            )
            message += f"the longest sequence has {longest:,}"
            yield Problem(message, one.engine.spans("tp"), source=one.engine.source)


def _footprint(one: Planned) -> Footprint:
    from allocation.memory import footprint  # slow to import, and needed only where a model is known

    return footprint(one.plan, one.work)


def _size(group: Sequence[Planned]) -> tuple[int, int]:
    """Return the needed bytes and the bytes of a GPU; the same number twice if they are unknown."""
    from allocation.memory import shared_peak

    memory = group[0].work.memory
    size = shared_peak([_footprint(one) for one in group], offload=memory.offload)
    return size, memory.gpu_bytes or size


def _sharing(planned: Sequence[Planned]) -> list[list[Planned]]:
    """Return the engines that lie on one GPU together, for every GPU whose engines are not all on another one too."""
    edges = [
        (edge, begins, i)
        for i, one in enumerate(planned)
        for ids in one.plan.gpus
        for edge, begins in ((ids.start, True), (ids.stop, False))
    ]
    here: frozenset[int] = frozenset()
    met = set()
    for _, _, i in sorted(edges):  # where two ranges touch, one ends before the other begins
        here ^= {i}
        met.add(here)
    most = [group for group in met if not any(group < other for other in met)]
    return [[planned[i] for i in group] for group in sorted(map(sorted, most))]


def _names(group: Sequence[Planned]) -> str:
    names = " and ".join(one.engine.role for one in group)
    return f"{names} together need" if len(group) > 1 else f"{names} needs"


def _breakdown(group: Iterable[Planned]) -> str:
    """Return the hungriest phase of each engine with its items, the largest first."""
    said = []
    for peak, role in ((_footprint(one).peak, one.engine.role) for one in group):
        items = sorted(peak.items, key=lambda item: -item.bytes)
        shown = ", ".join(f"{item.name} {item.bytes / GIB:.1f}" for item in items if item.bytes >= 0.05 * GIB)
        said.append(f"{role} in {peak.name}: {shown}")
    return "; ".join(said)


def _fitting_option(group: Sequence[Planned]) -> Remedy | None:
    """Return the first option with which the same layout fits, and its memory."""
    for settings, change in _options(group):
        other = [one._replace(work=change(one.work)) for one in group]
        size, room = _size(other)
        if size <= room and not any(cache_holds_a_sequence(other)):
            return Remedy(settings, f" so that the layout needs {size / GIB:.1f} GiB")
    return None


_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
Option = tuple[tuple[tuple[str, Any], ...], Callable[[Workload], Workload]]
"""Settings, and the function that changes a workload to one with them."""


def _option(part: str, **values: Any) -> Option:
    """Return an option: new values in one part of the workload. An empty value is not a setting to write."""
    settings = tuple((name, value) for name, value in values.items() if value != ())

    def change(work: Workload) -> Workload:
        own = getattr(work, part)
        return replace(work, **{part: replace(own, **values)}) if own else work  # a role may have no batch

    return settings, change


def _both(first: Option, second: Option) -> Option:
    return (*first[0], *second[0]), lambda work: second[1](first[1](work))


def _options(group: Sequence[Planned]) -> Iterator[Option]:
    """Yield options that save memory, the cheapest in time first, then together with full recomputation."""
    trainers = [one.work for one in group if one.plan.kind != SERVER]
    if any(one.plan.backend == "fsdp" for one in group):
        yield _option("memory", gradient_checkpointing=True)
        yield _option("memory", gradient_checkpointing=True, offload_params=True)
        yield from _smaller(group)
        return
    if any(not work.megatron.use_distributed_optimizer for work in trainers):
        yield _option("megatron", use_distributed_optimizer=True)
    yield from _smaller(group)
    if _same_gpus(group):
        yield _option("memory", offload=True)
    on_host = _option("megatron", optimizer_offload=True)
    if all(work.megatron.recompute_granularity == "full" for work in trainers):
        yield on_host
        return
    recomputed = _option("megatron", **_FULL, recompute_modules=())
    yield recomputed
    for smaller in (*_smaller(group), on_host):
        yield _both(recomputed, smaller)


def _same_gpus(group: Sequence[Planned]) -> bool:
    """Return whether trainers and servers use exactly the same GPUs, and so can be time-shared."""
    kinds = {one.plan.kind for one in group}
    return len(kinds) > 1 and SERVER in kinds and len({one.plan.gpus for one in group}) == 1


def _smaller(group: Sequence[Planned]) -> Iterator[Option]:
    """Yield smaller micro-batches, as long as the longest sequence fits, and smaller shares for a server."""
    batch, share = group[-1].work.batch, group[0].work.memory.mem_fraction_static
    if batch is not None and batch.max_tokens_per_mb is not None and batch.micro_batch is None:
        tokens = batch.max_tokens_per_mb // 2
        while tokens >= max(512, batch.max_length or 0):
            yield _option("batch", max_tokens_per_mb=tokens)
            tokens //= 2
    servers = any(one.plan.kind == SERVER for one in group)
    for tenths in range(int(share * 10 - 0.01), 0, -1) if servers else ():
        yield _option("memory", mem_fraction_static=tenths / 10)
