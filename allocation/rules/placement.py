"""Rules about GPUs: cluster totals, `d*`, colocation, explicit ids, and servers across nodes."""

from collections.abc import Iterator, Sequence

from allocation.backends import SERVER
from allocation.diagnostics import Problem, Severity, Span
from allocation.gpus import Gpus, merge, n_gpus
from allocation.language.spelling import gpu_ranges
from allocation.language.syntax import LARGEST
from allocation.placement import DEFAULT_GPUS_PER_NODE, PlacementRequest, explicit, takes_the_rest
from allocation.plan import Cluster
from allocation.registry import LANGUAGE, rule
from allocation.resolve import Engine

LARGEST_WORLD = 1 << 20

Spans = tuple[Span, ...]


@rule("ALLOC-STAR-CLUSTER", source=LANGUAGE)
def star_needs_cluster(open_request: PlacementRequest) -> Iterator[Problem]:
    """`d*` takes the rest of the cluster, so the cluster must be known."""
    for first in _open(open_request) if open_request.cluster is None else ():
        yield _problem_of(first, "`d*` needs a known cluster", first.spans("dp"), "set the cluster, for example 1x8")


@rule("ALLOC-STAR-TWICE", source=LANGUAGE)
def star_once(open_request: PlacementRequest) -> Iterator[Problem]:
    """Only one group can take the rest of the cluster."""
    if len(firsts := _open(open_request)) > 1:
        message = "`d*` appears in two groups; only one group can take the remaining GPUs"
        marks = [(engine, engine.spans("dp")) for engine in firsts[1::-1]]
        yield _together(message, marks, "write a number in the other group")


def _open(request: PlacementRequest) -> list[Engine]:
    """Return the first engine of every group that takes the rest of the cluster."""
    return [group[0] for group in request.groups if takes_the_rest(group)]


@rule("ALLOC-STAR-ROOM", source=LANGUAGE)
def star_has_room(group: tuple[Engine, ...], room: int) -> Iterator[Problem]:
    """`d*` needs room for at least one replica, and replicas are whole."""
    for engine in group:
        if engine.starred and (room == 0 or room % engine.per_replica):
            needs = f"a multiple of {engine.per_replica}" if room else f"at least {engine.smallest_world}"
            left = f"{room} GPUs are available" if room else "too few GPUs are left"
            yield _problem_of(engine, f"`{engine.label}` needs {needs} GPUs for `d*`, but {left}", engine.spans("dp"))


@rule("ALLOC-WORLD-LIMIT", source="a bound of this compiler, far above any real cluster")
def world_bounded(sized_request: PlacementRequest) -> Iterator[Problem]:
    """A count beyond a million GPUs is a typing error, and its tables would fill the memory."""
    for engine in sized_request.engines:
        if max(engine.world, n_gpus(explicit(engine))) > LARGEST_WORLD:
            message = f"`{_short(engine.label)}` needs {_number(engine.world)} GPUs; the limit is {LARGEST_WORLD:,}"
            yield _problem_of(engine, message, (engine.node.layout.span,))


@rule("ALLOC-CLUSTER-SIZE", source="compared here once; workers that wrap around GPUs are the alternative")
def fits_cluster(request: PlacementRequest, needs: list[int]) -> Iterator[Problem]:
    """All groups together must fit the cluster; colocated members count once."""
    cluster, help = request.cluster, None
    if cluster is None or sum(needs) <= cluster.n_gpus:
        return
    if len(needs) == 1:
        engine = max(request.groups[0], key=lambda e: e.world)
        asked = f"`{_short(engine.label)}` needs {_number(needs[0])} GPUs"
        marks = [(engine, engine.spans("dp", "tp", "pp", "cp"))]
    else:
        parts = " + ".join(map(_number, needs[:8])) + (" + …" if len(needs) > 8 else "")
        asked = f"the groups need {_number(sum(needs))} GPUs ({parts})"
        marks = [(group[0], (group[0].node.span,)) for group in request.groups]
        roles_apart = len({engine.source for engine in request.engines}) > 1  # one field per role, which takes no `|`
        help = "make the layouts smaller, or use a larger cluster"
        if not roles_apart:
            help = "colocate engines with `|`, or make them smaller"
    yield _together(f"{asked}; the cluster has {cluster.n_gpus} ({cluster})", marks, help)


@rule("ALLOC-COLOCATE-SIZE", source=LANGUAGE)
def colocated_equal(request: PlacementRequest, needs: list[int]) -> Iterator[Problem]:
    """Members joined by `|` run on the same GPUs, so they need equally many GPUs unless `@` names them."""
    for group, need in zip(request.groups, needs, strict=True):
        unplaced = [engine for engine in group if not engine.node.gpus]
        wrong = [engine for engine in unplaced if engine.world != need]
        if wrong:
            sizes = ", ".join(f"`{_short(e.label)}` has {_number(e.world)}" for e in group[:4])
            message = f"colocated engines need equally many GPUs: {sizes}"
            help = f"use {_number(need)} GPUs for each, or name the GPUs of each with `@`"
            others = [engine for engine in group if engine not in wrong]
            yield _together(message, [(e, (e.node.layout.span,)) for e in wrong + others], help)


@rule("ALLOC-GPU-COUNT", source=LANGUAGE)
def ids_match_world(request: PlacementRequest) -> Iterator[Problem]:
    """Every rank has one GPU: `@` lists exactly as many GPUs as the layout needs."""
    for engine in request.engines:
        ids = n_gpus(explicit(engine))
        if ids and ids != engine.world:
            message = f"`{_short(engine.label)}` has {_number(engine.world)} ranks, but `@` lists {_number(ids)} GPUs"
            yield _problem_of(engine, message, tuple(r.span for r in engine.node.gpus))


@rule("ALLOC-GPU-OUTSIDE", source=LANGUAGE)
def ids_in_cluster(request: PlacementRequest) -> Iterator[Problem]:
    """A GPU id is below the number of GPUs of the cluster; ids never wrap around."""
    for engine in request.engines:
        for ids in engine.node.gpus:
            if request.cluster and int(ids.last) >= request.cluster.n_gpus:
                message = f"GPU {ids.last} does not exist: the cluster has 0 to {request.cluster.n_gpus - 1}"
                yield _problem_of(engine, message, (ids.span,))


@rule("ALLOC-GPU-OVERLAP", source=LANGUAGE)
def groups_disjoint(request: PlacementRequest) -> Iterator[Problem]:
    """Groups joined by `+` use separate GPUs; `|` joins engines that share GPUs."""
    named = [(n, e, ids) for n, group in enumerate(request.groups) for e in group for ids in explicit(e)]
    last: tuple[int, Engine, range] | None = None
    for number, engine, ids in sorted(named, key=lambda entry: (entry[2].start, entry[0])):
        if last and ids.start < last[2].stop and number != last[0]:
            message = f"GPU {ids.start} is assigned to both `{_short(last[1].label)}` and `{_short(engine.label)}`"
            marks = [(e, (e.node.gpus[0].span,)) for e in (engine, last[1])]
            yield _together(message, marks, "join the two engines with `|` to share GPUs")
        if last is None or ids.stop > last[2].stop:
            last = (number, engine, ids)


@rule("ALLOC-CLUSTER-IDLE", source="GPUs that nobody uses are paid for", severity=Severity.NOTE)
def idle_gpus(request: PlacementRequest, needs: list[int]) -> Iterator[Problem]:
    """GPUs of the cluster that the allocation leaves unused are reported."""
    if request.cluster and sum(needs) < request.cluster.n_gpus:
        idle = request.cluster.n_gpus - sum(needs)
        yield Problem(f"{idle} of the cluster's {request.cluster.n_gpus} GPUs stay idle")


@rule("ALLOC-SERVER-NODE", source="SGLang server_args.py: nnodes divides tp_size")
def server_in_node(placed: Sequence[tuple[Engine, Gpus]], cluster: Cluster | None) -> Iterator[Problem]:
    """A server's tensor-parallel GPUs are on one node or fill several nodes, unless `@` names the GPUs."""
    per_node = _per_node(cluster)
    named = any(engine.node.gpus for engine, _ in placed)
    for engine, gpus in _with_tensor_parallelism(placed):
        if engine.tp > per_node and engine.tp % per_node:
            message = f"`{engine.says('tp')}` is more than the {per_node} GPUs of a node, and not a multiple of them"
            yield _problem_of(engine, message, engine.spans("tp"), f"use more servers with a t that divides {per_node}")
        elif split := _first_split(gpus, engine.tp, per_node):
            ids = ",".join(map(str, gpu_ranges(split)))
            where = "on several nodes" if engine.tp <= per_node else "on parts of nodes"
            message = f"tensor-parallel GPUs {ids} of `{_short(engine.label)}` are {where}"
            help = (
                f"use a t that divides the {per_node} GPUs of a node"
                if per_node % engine.tp and engine.tp < per_node
                else "write this engine first"
            )
            help = "name its GPUs with `@`, each server's on one node" if named else help
            yield _problem_of(engine, message, engine.spans("tp"), help)


@rule("ALLOC-SERVER-NODES", source="SGLang server_args.py: nnodes", severity=Severity.WARNING)
def server_over_nodes(placed: Sequence[tuple[Engine, Gpus]], cluster: Cluster | None) -> Iterator[Problem]:
    """A server over several nodes sends activations over the network in each layer, and needs a process on each node;
    runs of areal-like start each server on one node."""
    per_node = _per_node(cluster)
    for engine, _ in _with_tensor_parallelism(placed):
        if engine.tp > per_node and engine.tp % per_node == 0:
            message = f"each server of `{_short(engine.label)}` spans {engine.tp // per_node} nodes"
            yield _problem_of(engine, message, engine.spans("tp"))


def _per_node(cluster: Cluster | None) -> int:
    return cluster.n_gpus_per_node if cluster else DEFAULT_GPUS_PER_NODE


def _with_tensor_parallelism(placed: Sequence[tuple[Engine, Gpus]]) -> Iterator[tuple[Engine, Gpus]]:
    """Return the servers with several tensor-parallel GPUs that the compiler has placed."""
    return ((e, gpus) for e, gpus in placed if e.backend.kind == SERVER and not e.node.gpus and e.tp > 1)


def _first_split(gpus: Gpus, tp: int, per_node: int) -> Gpus:
    """Return the GPUs of the first tensor-parallel group that spans more nodes than necessary, empty if none does."""
    unit = min(tp, per_node)
    if per_node % unit == 0 and all(r.start % unit == 0 and r.stop % unit == 0 for r in gpus):
        return ()
    ids = [gpu for r in gpus for gpu in r]
    groups = (ids[i : i + tp] for i in range(0, len(ids), tp))
    nodes = -(-tp // per_node)
    split = next((group for group in groups if len({gpu // per_node for gpu in group}) > nodes), ())
    return merge(range(gpu, gpu + 1) for gpu in split)


def _problem_of(engine: Engine, message: str, spans: Spans, help: str | None = None) -> Problem:
    """Return a problem of one engine, in that engine's text."""
    return Problem(message, spans, help, engine.source)


def _together(message: str, marks: Sequence[tuple[Engine, Spans]], help: str | None = None) -> Problem:
    """Return a problem of several engines.

    Spans are kept if one text contains them all; else the request's text is used.
    """
    if len({engine.source for engine, _ in marks}) > 1:
        return Problem(message, (), help)
    return _problem_of(marks[0][0], message, tuple(span for _, spans in marks for span in spans), help)


def _number(value: int) -> str:
    return f"{value:,}" if value < LARGEST else "more than 10^18"


def _short(text: str) -> str:
    return text if len(text) <= 48 else text[:40] + "…"
