"""GPU ids as ranges, in the order of the ranks that run on them."""

from collections.abc import Iterable

Gpus = tuple[range, ...]


def n_gpus(gpus: Iterable[range]) -> int:
    """Return the number of ids."""
    return sum(map(len, gpus))


def merge(gpus: Iterable[range]) -> Gpus:
    """Return the ids in the same order, with adjacent ranges joined."""
    runs: list[range] = []
    for ids in gpus:
        if runs and ids.start == runs[-1].stop:
            runs[-1] = range(runs[-1].start, ids.stop)
        elif ids:
            runs.append(ids)
    return tuple(runs)


def union(parts: Iterable[Iterable[range]]) -> Gpus:
    """Return the ids of all parts, each once, in ascending order."""
    runs: list[range] = []
    for ids in sorted((ids for part in parts for ids in part), key=lambda ids: ids.start):
        if runs and ids.start <= runs[-1].stop:
            runs[-1] = range(runs[-1].start, max(runs[-1].stop, ids.stop))
        else:
            runs.append(ids)
    return tuple(runs)


def meet(first: Iterable[range], second: Iterable[range]) -> bool:
    """Return whether an id is in both."""
    others = tuple(second)
    return any(a.start < b.stop and b.start < a.stop for a in first for b in others)
