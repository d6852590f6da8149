"""Placement of engines on GPUs: `d*`, colocation and explicit ids. The rules are in `rules/placement.py`.

Groups take the lowest free GPU ids from left to right; ids named in the string are reserved first.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from allocation.diagnostics import Finding, Source, has_errors
from allocation.gpus import Gpus, n_gpus, union
from allocation.language.syntax import LARGEST
from allocation.plan import Cluster, EnginePlan
from allocation.registry import UnknownSize, run_rules
from allocation.resolve import Engine
from allocation.settings import Workload

DEFAULT_GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """The input of placement: engines in groups, and the cluster (None: as large as needed)."""

    groups: tuple[tuple[Engine, ...], ...]
    cluster: Cluster | None

    @property
    def engines(self) -> Iterator[Engine]:
        """All engines, left to right."""
        return (engine for group in self.groups for engine in group)


class Planned(NamedTuple):
    """An engine as written, as planned, and with its workload. All GPUs have the same size."""

    engine: Engine
    plan: EnginePlan
    work: Workload


def explicit(engine: Engine) -> Gpus:
    """Return the ids that the string assigns to `engine`. Raises `UnknownSize` when they are unusable."""
    bounds = [(int(r.first), int(r.last)) for r in engine.node.gpus]
    if any(first > last or last > LARGEST for first, last in bounds):
        raise UnknownSize("gpus")
    return tuple(range(first, last + 1) for first, last in bounds)


def group_size(group: Sequence[Engine]) -> int:
    """Return GPUs of a colocated group: its ids if it names any, else its largest member with a known number.

    Raises `UnknownSize`.
    """
    named = union(explicit(engine) for engine in group)
    return n_gpus(named) if named else max(engine.world for engine in group if not engine.starred)


def takes_the_rest(group: Sequence[Engine]) -> bool:
    """Return whether only the cluster determines the number of GPUs of a group with `d*`."""
    return all(engine.starred and not engine.node.gpus for engine in group)


def fill_stars(request: PlacementRequest, source: Source) -> tuple[PlacementRequest, list[Finding]]:
    """Return the request with every `d*` replaced by a number, as far as that is possible."""
    if not any(engine.starred for engine in request.engines):
        return request, []
    findings = run_rules(source, open_request=request)
    if findings:
        return request, findings
    groups = []
    for group in request.groups:
        if any(engine.starred for engine in group):
            try:
                room = _room(request, group)
                findings += run_rules(source, group=group, room=room)
                group = tuple(
                    replace(e, sizes={**e.sizes, "dp": room // e.per_replica or None}) if e.starred else e
                    for e in group
                )
            except UnknownSize:
                return request, findings
        groups.append(group)
    return PlacementRequest(tuple(groups), request.cluster), findings


def _room(request: PlacementRequest, group: tuple[Engine, ...]) -> int:
    """Return the GPUs for a group with `d*`: the number from its other members or ids, else the rest of the cluster.

    The rest is rounded down to a number that suits every starred layout.
    """
    if not takes_the_rest(group):
        return group_size(group)
    others = sum(group_size(other) for other in request.groups if other is not group)
    left = max(0, request.cluster.n_gpus - others) if request.cluster else 0
    unit = math.lcm(*(math.lcm(engine.smallest_world, engine.per_replica) for engine in group))
    return left // unit * unit


def place(request: PlacementRequest, source: Source) -> tuple[tuple[Gpus, ...], list[Finding]]:
    """Return GPU ids of every engine, left to right, and the findings; without sizes nothing is placed."""
    try:
        for engine in request.engines:
            _ = engine.world, explicit(engine)
        needs = [group_size(group) for group in request.groups]
    except UnknownSize:
        return (), []
    findings = run_rules(source, sized_request=request) or run_rules(source, request=request, needs=needs)
    if has_errors(findings):
        return (), findings
    free = _subtract(range(LARGEST), union(explicit(engine) for engine in request.engines))
    current = next(free)
    placed: list[Gpus] = []
    for group, need in zip(request.groups, needs, strict=True):
        named = [explicit(engine) for engine in group if engine.node.gpus]
        ids = named[0] if len(named) == 1 else union(named)
        while n_gpus(ids) < need:
            current = current or next(free)
            ids += (current[: need - n_gpus(ids)],)
            current = current[len(ids[-1]) :]
        placed += [explicit(engine) or ids for engine in group]
    findings += run_rules(source, placed=tuple(zip(request.engines, placed, strict=True)), cluster=request.cluster)
    return tuple(placed), findings


def _subtract(everything: range, taken: Gpus) -> Iterator[range]:
    """Return `everything` except `taken`, which is ascending."""
    start = everything.start
    for gpus in taken:
        if gpus.start > start:
            yield range(start, gpus.start)
        start = gpus.stop
    yield range(start, everything.stop)
