"""Which GPUs each engine gets: `d*`, colocation, explicit ids, and the cluster's total.

Groups take the lowest free GPU ids from left to right; ids that the string names are set aside first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from allocation.diagnostics import Finding, Problem, Severity, Source, UnknownSize, has_errors, rule, run_rules
from allocation.plan import Cluster
from allocation.resolve import Engine
from allocation.syntax import LARGEST

_LANGUAGE = "the allocation language"
LARGEST_WORLD = 1 << 20
DEFAULT_GPUS_PER_NODE = 8

Gpus = tuple[range, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """What placement is asked for: engines in groups, and the cluster (None: as large as needed)."""

    groups: tuple[tuple[Engine, ...], ...]
    cluster: Cluster | None

    @property
    def engines(self) -> Iterator[Engine]:
        """All engines, left to right."""
        return (engine for group in self.groups for engine in group)


def n_gpus(gpus: Gpus) -> int:
    """Number of ids in `gpus`."""
    return sum(map(len, gpus))


def explicit(engine: Engine) -> Gpus:
    """The ids that the string gives to `engine`. Raises `UnknownSize` when they are unusable."""
    bounds = [(int(r.first), int(r.last)) for r in engine.node.gpus]
    if any(first > last or last > LARGEST for first, last in bounds):
        raise UnknownSize("gpus")
    return tuple(range(first, last + 1) for first, last in bounds)


def group_size(group: Sequence[Engine]) -> int:
    """GPUs of a colocated group: its ids if it names any, else its largest member. Raises `UnknownSize`."""
    named = _union(explicit(engine) for engine in group)
    return n_gpus(named) if named else max(engine.world for engine in group)


def fill_stars(request: Request, source: Source) -> tuple[Request, list[Finding]]:
    """The request with every `d*` replaced by a number, as far as that is possible."""
    if not any(engine.starred for engine in request.engines):
        return request, []
    findings = run_rules("star", source, request)
    if findings:
        return request, findings
    groups = []
    for group in request.groups:
        if any(engine.starred for engine in group):
            try:
                room = _room(request, group)
                findings += run_rules("star room", source, request, group, room)
                group = tuple(_fill(engine, room) if engine.starred else engine for engine in group)
            except UnknownSize:
                return request, findings
        groups.append(group)
    return Request(tuple(groups), request.cluster), findings


def _fill(engine: Engine, room: int) -> Engine:
    dp = room // engine.per_replica
    return replace(engine, sizes={**engine.sizes, "dp": dp}) if dp else engine


def _room(request: Request, group: tuple[Engine, ...]) -> int:
    """GPUs for a group with `d*`: what its other members or ids say, else what the cluster leaves.

    What is left is rounded down to a number on which every starred layout fits.
    """
    fixed = [engine for engine in group if not engine.starred]
    named = _union(explicit(engine) for engine in group)
    if named:
        return n_gpus(named)
    if fixed:
        return group_size(fixed)
    others = sum(group_size(other) for other in request.groups if other is not group)
    left = max(0, request.cluster.n_gpus - others) if request.cluster else 0
    unit = math.lcm(*(math.lcm(engine.smallest_world, engine.per_replica) for engine in group))
    return left // unit * unit


def place(request: Request, source: Source) -> tuple[tuple[Gpus, ...], list[Finding]]:
    """GPU ids of every engine, left to right, and the findings; without sizes nothing is placed."""
    try:
        for engine in request.engines:
            _ = engine.world, explicit(engine)
        needs = [group_size(group) for group in request.groups]
    except UnknownSize:
        return (), []
    findings = run_rules("placement", source, request, needs)
    if has_errors(findings):
        return (), findings
    free = _without(range(LARGEST), _union(explicit(engine) for engine in request.engines))
    current = next(free)
    placed: list[Gpus] = []
    for group, need in zip(request.groups, needs, strict=True):
        named = [explicit(engine) for engine in group if engine.node.gpus]
        ids = named[0] if len(named) == 1 else _union(named)
        while n_gpus(ids) < need:
            current = current or next(free)
            ids += (current[: need - n_gpus(ids)],)
            current = current[len(ids[-1]) :]
        placed += [explicit(engine) or ids for engine in group]
    findings += run_rules("placed", source, request, placed)
    return tuple(placed), findings


def _union(parts: Iterable[Gpus]) -> Gpus:
    """The ids of all parts, each once, in ascending order."""
    merged: list[range] = []
    for gpus in sorted((r for ids in parts for r in ids), key=lambda r: r.start):
        if merged and gpus.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, gpus.stop))
        else:
            merged.append(gpus)
    return tuple(merged)


def _without(everything: range, taken: Gpus) -> Iterator[range]:
    """What is left of `everything`; `taken` is ascending."""
    start = everything.start
    for gpus in taken:
        if gpus.start > start:
            yield range(start, gpus.start)
        start = gpus.stop
    yield range(start, everything.stop)


@rule("ALLOC-STAR-CLUSTER", "star", source=_LANGUAGE)
def star_needs_cluster(request: Request) -> Iterator[Problem]:
    """`d*` is as many as the cluster leaves, so the cluster must be known."""
    for group in request.groups:
        if request.cluster is None and all(e.starred for e in group) and not any(e.node.gpus for e in group):
            yield Problem("`d*` needs to know the cluster", group[0].spans("dp"), "give the cluster, for example 1x8")


@rule("ALLOC-STAR-TWICE", "star", source=_LANGUAGE)
def star_once(request: Request) -> Iterator[Problem]:
    """Two groups that both take what is left have no single answer."""
    open_groups = [g for g in request.groups if all(e.starred for e in g) and not any(e.node.gpus for e in g)]
    if len(open_groups) > 1:
        spans = tuple(engine.spans("dp")[0] for group in open_groups[1::-1] for engine in group[:1])
        yield Problem(
            "`d*` stands in two groups; what is left can go to one only", spans, "write a number in the other"
        )


@rule("ALLOC-STAR-ROOM", "star room", source=_LANGUAGE)
def star_has_room(request: Request, group: tuple[Engine, ...], room: int) -> Iterator[Problem]:
    """At least one replica must fit into what `d*` may take, and replicas are whole."""
    for engine in group:
        if engine.starred and (room == 0 or room % engine.per_replica):
            left = f"{room} GPUs are there" if room else "too few GPUs are left"
            message = f"`{engine.label}` needs a multiple of {engine.per_replica} GPUs for `d*`, but {left}"
            if not room:
                message = f"`{engine.label}` needs at least {engine.smallest_world} GPUs for `d*`, but {left}"
            yield Problem(message, engine.spans("dp"))


@rule("ALLOC-WORLD-LIMIT", "placement", source="a bound of this compiler, far above any real cluster")
def world_bounded(request: Request, needs: list[int]) -> Iterator[Problem]:
    """Beyond a million GPUs a count is a typing mistake, and the tables that follow would fill the memory."""
    for engine in request.engines:
        if max(engine.world, n_gpus(explicit(engine))) > LARGEST_WORLD:
            message = f"`{_short(engine.label)}` asks for {_number(engine.world)} GPUs; at most {LARGEST_WORLD:,} are laid out"
            yield Problem(message, (engine.node.layout.span,))


@rule("ALLOC-CLUSTER-SIZE", "placement", source="compared here once; workers that wrap around GPUs are the alternative")
def fits_cluster(request: Request, needs: list[int]) -> Iterator[Problem]:
    """All groups together must fit the cluster; colocated members count once."""
    cluster = request.cluster
    if cluster is None or sum(needs) <= cluster.n_gpus:
        return
    if len(needs) == 1:
        engine = max(request.groups[0], key=lambda e: e.world)
        asked = f"`{_short(engine.label)}` asks for {_number(needs[0])} GPUs"
        spans = engine.spans("dp", "tp", "pp", "cp")
        help = None
    else:
        parts = " + ".join(map(_number, needs[:8])) + (" + …" if len(needs) > 8 else "")
        asked = f"{_number(sum(needs))} GPUs are asked for ({parts})"
        spans = tuple(group[0].node.span for group in request.groups)
        help = "colocate engines with `|`, or make them smaller"
    yield Problem(f"{asked}, the cluster has {cluster.n_gpus} ({cluster})", spans, help)


@rule("ALLOC-COLOCATE-SIZE", "placement", source=_LANGUAGE)
def colocated_equal(request: Request, needs: list[int]) -> Iterator[Problem]:
    """Members joined by `|` run on the same GPUs, so they have equally many unless `@` says which."""
    for group, need in zip(request.groups, needs, strict=True):
        unplaced = [engine for engine in group if not engine.node.gpus]
        wrong = [engine for engine in unplaced if engine.world != need]
        if wrong:
            sizes = ", ".join(f"`{_short(e.label)}` has {_number(e.world)}" for e in group[:4])
            message = f"colocated engines need equally many GPUs: {sizes}"
            help = f"give each {_number(need)} GPUs, or say with `@` which GPUs the smaller one has"
            yield Problem(
                message, tuple(e.node.layout.span for e in (*wrong, *(e for e in group if e not in wrong))), help
            )


@rule("ALLOC-GPU-COUNT", "placement", source=_LANGUAGE)
def ids_match_world(request: Request, needs: list[int]) -> Iterator[Problem]:
    """Every rank has one GPU: `@` lists exactly as many as the layout has."""
    for engine in request.engines:
        ids = n_gpus(explicit(engine))
        if ids and ids != engine.world:
            message = f"`{_short(engine.label)}` has {_number(engine.world)} ranks, but `@` lists {_number(ids)} GPUs"
            yield Problem(message, tuple(r.span for r in engine.node.gpus))


@rule("ALLOC-GPU-OUTSIDE", "placement", source=_LANGUAGE)
def ids_in_cluster(request: Request, needs: list[int]) -> Iterator[Problem]:
    """A GPU id is below the number of GPUs of the cluster; ids never wrap around."""
    for engine in request.engines:
        for ids in engine.node.gpus:
            if request.cluster and int(ids.last) >= request.cluster.n_gpus:
                message = f"GPU {ids.last} does not exist: the cluster has 0 to {request.cluster.n_gpus - 1}"
                yield Problem(message, (ids.span,))


@rule("ALLOC-GPU-OVERLAP", "placement", source=_LANGUAGE)
def groups_disjoint(request: Request, needs: list[int]) -> Iterator[Problem]:
    """Groups joined by `+` are on separate GPUs; sharing is said with `|`."""
    named = [(n, e, ids) for n, group in enumerate(request.groups) for e in group for ids in explicit(e)]
    last: tuple[int, Engine, range] | None = None
    for number, engine, ids in sorted(named, key=lambda entry: (entry[2].start, entry[0])):
        if last and ids.start < last[2].stop and number != last[0]:
            message = f"GPU {ids.start} is given to `{_short(last[1].label)}` and to `{_short(engine.label)}`"
            spans = (engine.node.gpus[0].span, last[1].node.gpus[0].span)
            yield Problem(message, spans, "join the two with `|` to share GPUs")
        if last is None or ids.stop > last[2].stop:
            last = (number, engine, ids)


@rule("ALLOC-CLUSTER-IDLE", "placement", source="GPUs that nobody uses are paid for", severity=Severity.NOTE)
def idle_gpus(request: Request, needs: list[int]) -> Iterator[Problem]:
    """Says how many GPUs of the cluster the allocation leaves unused."""
    if request.cluster and sum(needs) < request.cluster.n_gpus:
        idle = request.cluster.n_gpus - sum(needs)
        yield Problem(f"{idle} of the cluster's {request.cluster.n_gpus} GPUs stay idle")


@rule("ALLOC-SERVER-NODE", "placed", source="SGLang: tensor parallelism needs the links inside a node")
def server_in_node(request: Request, placed: list[Gpus]) -> Iterator[Problem]:
    """Tensor parallelism of a server stays inside a node, unless `@` names the GPUs."""
    per_node = request.cluster.n_gpus_per_node if request.cluster else DEFAULT_GPUS_PER_NODE
    for engine, gpus in zip(request.engines, placed, strict=True):
        if engine.backend.kind != "server" or engine.node.gpus or engine.tp == 1:
            continue
        if engine.tp > per_node:
            message = f"`{engine.says('tp')}` is more than the {per_node} GPUs of a node"
            yield Problem(message, engine.spans("tp"), "use p across nodes and t inside, or name the GPUs with `@`")
        elif split := _first_split(gpus, engine.tp, per_node):
            message = f"tensor-parallel GPUs {split[0]} to {split[-1]} of `{_short(engine.label)}` are on two nodes"
            yield Problem(message, engine.spans("tp"), "put larger engines first, or name the GPUs with `@`")


def _first_split(gpus: Gpus, tp: int, per_node: int) -> range | None:
    if per_node % tp == 0 and all(r.start % tp == 0 and r.stop % tp == 0 for r in gpus):
        return None
    ids = [gpu for r in gpus for gpu in r]
    for i in range(0, len(ids), tp):
        if ids[i] // per_node != ids[i + tp - 1] // per_node:
            return range(ids[i], ids[i + tp - 1] + 1)
    return None


def _number(value: int) -> str:
    return f"{value:,}" if value < LARGEST else "more than 10^18"


def _short(text: str) -> str:
    return text if len(text) <= 48 else text[:40] + "…"
