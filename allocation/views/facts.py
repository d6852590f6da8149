"""Facts about an engine for every view: sizes, rank maps, and the links that groups use."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allocation.backends import SERVER
from allocation.grid import RankGrid
from allocation.language.reading import parse
from allocation.language.syntax import Layout
from allocation.plan import DENSE_GROUPS, EXPERT_GROUPS, EnginePlan, Plan

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Everything per rank is shown up to this world size; beyond it, it would take seconds and gigabytes.
MOST_RANKS = 1 << 17
SERVERS = "server"

# Data that a group exchanges (Megatron-LM core/parallel_state.py and the callers of its getters).
CARRIES = {
    "tp": "activations of dense layers",
    "cp": "keys and values of attention",
    "dp": "loss averages",
    "dp-cp": "gradients, optimizer shards (dense)",
    "pp": "activations between stages",
    "tp-pp": "gradient norm (dense)",
    "tp-cp": "router statistics",
    "tp-dp": "FP8 scales",
    "tp-dp-cp": "FP8 scales, global router statistics",
    "embedding": "gradients of tied embeddings",
    "position-embedding": "gradients of learned positions",
    "ep": "tokens to their experts and back",
    "etp": "activations of experts",
    "etp-ep": "tokens, when experts are split by ETP",
    "etp-ep-pp": "gradient norm (experts)",
    "edp": "gradients, optimizer shards (experts)",
    SERVERS: "activations, within one replica",
}


_EXPERTS = "parts of each layer's experts"
_SERVER_NOTES = {"dp": "servers", "tp": "parts of each matrix", "pp": "stages of each server", "ep": _EXPERTS}
_NOTES = {
    "dp": "copies of the dense layers", "pp": "stages", "tp": "parts of each dense matrix",
    "cp": "parts of each sequence", "vpp": "model chunks per rank", "ep": _EXPERTS,
}  # fmt: skip
_NAMES = {
    "dp": "data parallel", "pp": "pipeline parallel", "tp": "tensor parallel", "cp": "context parallel",
    "vpp": "virtual pipeline", "ep": "expert parallel", "etp": "expert tensor parallel", "edp": "expert data parallel",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Size:
    """One row of the table of sizes: `note` explains the number."""

    name: str
    short: str
    value: int
    note: str


def sizes(engine: EnginePlan) -> list[Size]:
    """Return the sizes of an engine in the order of the language's letters, the experts' last."""
    s = engine.sizes
    hidden = {name for name in ("pp", "ep") if getattr(s, name) == 1}
    notes = _SERVER_NOTES
    if engine.kind != SERVER:
        etp = "parts of each expert"
        if s.tp > 1 and not any(dim.letter == "t" for dim in _layout(engine).ffn or ()):
            etp += f"; not written: 1, where Megatron's own default is TP ({s.tp})"
        edp = f"copies of the experts: {engine.world_size}/({s.etp}·{s.ep}·{s.pp})"
        notes = _NOTES | {"etp": etp, "edp": edp}
        hidden = {"vpp"} if s.vpp == 1 else set()
        hidden |= set() if has_experts(engine) else {"ep", "etp", "edp"}
        hidden |= set() if engine.expert else {"pp"}
    return [Size(_NAMES[name], name, getattr(s, name), note) for name, note in notes.items() if name not in hidden]


def _layout(engine: EnginePlan) -> Layout:
    return next(parse(engine.text).members).layout


def has_experts(engine: EnginePlan) -> bool:
    """Return whether the string mentions experts; otherwise their grid would only confuse."""
    return engine.sizes.ep > 1 or _layout(engine).ffn is not None


@dataclass(frozen=True, slots=True)
class Link:
    """The links of all groups of one name: `same_node` of them stay within a node, `across` do not."""

    name: str
    groups: int
    size: int
    same_node: int

    @property
    def across(self) -> int:
        """Groups with ranks on several nodes."""
        return self.groups - self.same_node

    @property
    def words(self) -> str:
        """The links that the groups use, in words."""
        mixed = f"{self.same_node} same node, {self.across} across"
        return "same node" if not self.across else mixed if self.same_node else "across nodes"


def rank_groups(engine: EnginePlan) -> Mapping[str, NDArray[np.int64]]:
    """Return every group of an engine by name, `[groups, size]`; for a server, its replicas."""
    if engine.kind != SERVER:
        return engine.all_groups()
    import numpy as np

    return {SERVERS: np.arange(engine.world_size).reshape(engine.sizes.dp, -1)}


def engines_with(name: str, engines: Sequence[EnginePlan]) -> tuple[EnginePlan, ...]:
    """Return the engines that have a group `name`. Raises `KeyError` when none has."""
    if having := tuple(engine for engine in engines if name in rank_groups(engine)):
        return having
    names = dict.fromkeys(known for engine in engines for known in rank_groups(engine))
    raise KeyError(f"unknown group {name}; the groups are {', '.join(names)}")


def links(engine: EnginePlan) -> list[Link]:
    """Return one row per kind of group that has more than one rank, without the experts' where there are none."""
    import numpy as np

    nodes = np.concatenate([np.arange(gpus.start, gpus.stop) for gpus in engine.gpus]) // engine.n_gpus_per_node
    on = {name: nodes[groups] for name, groups in _select_used(engine).items()}
    return [Link(name, len(at), at.shape[1], int((at == at[:, :1]).all(axis=1).sum())) for name, at in on.items()]


def groups_of(engine: EnginePlan, rank: int) -> dict[str, list[int]]:
    """Return the members of every group with several ranks that `rank` is in, by the name of the group."""
    rows = {name: groups[(groups == rank).any(axis=1)] for name, groups in _select_used(engine).items()}
    return {name: found[0].tolist() for name, found in rows.items() if len(found)}


def _select_used(engine: EnginePlan) -> dict[str, NDArray[np.int64]]:
    """Return groups with several ranks that something uses: three for FSDP, the expert groups only with experts."""
    hidden: Collection[str] = () if engine.kind == SERVER or has_experts(engine) else EXPERT_GROUPS
    if engine.backend == "fsdp":
        hidden = {*DENSE_GROUPS} - {"tp", "cp", "dp-cp"}
    return {name: g for name, g in rank_groups(engine).items() if g.shape[1] > 1 and name not in hidden}


@dataclass(frozen=True, slots=True)
class RankMap:
    """The content of a picture: the coordinates of every rank, and the group (over `by`) that gives its colour.

    `labels[rank]` has the axes with more than one position: `t1p0`. `groups[rank]` numbers the groups from 0.
    """

    title: str
    by: str
    labels: tuple[str, ...]
    groups: tuple[int, ...]


def plan_maps(plan: Plan, by: str | None = None) -> list[tuple[EnginePlan, list[RankMap]]]:
    """Return the maps of every engine; an engine without a group `by` uses its default.

    Raises `KeyError` if none has it.
    """
    having = engines_with(by, plan.engines) if by else ()
    return [(engine, rank_maps(engine, by if engine in having else None)) for engine in plan.engines]


def rank_maps(engine: EnginePlan, by: str | None = None) -> list[RankMap]:
    """Return the maps of the dense grid and, with experts, of the expert grid; for a server, the map of its replicas.

    `by` is the group to colour by, by default the innermost with more than one rank. Raises `KeyError` for a group that
    the engine does not have.
    """
    groups = rank_groups(engine)
    if by is not None and by not in groups:
        raise KeyError(f"{engine.role} has no group {by!r}; its groups are {', '.join(groups)}")
    if engine.kind == SERVER:
        grid = RankGrid(("tp", "pp", "dp"), (engine.sizes.tp, engine.sizes.pp, engine.sizes.dp))
        return [_map("servers", SERVERS, grid, groups)]
    maps = [_map("dense grid", by or _first(groups, ("tp", "cp", "dp", "pp")), engine.dense, groups)]
    if engine.expert and has_experts(engine):
        maps.append(_map("expert grid", by or _first(groups, ("ep", "etp", "edp", "pp")), engine.expert, groups))
    return maps


def _first(groups: Mapping[str, NDArray[np.int64]], names: tuple[str, ...]) -> str:
    return next((name for name in names if groups[name].shape[1] > 1), names[0])


def _map(title: str, by: str, grid: RankGrid, groups: Mapping[str, NDArray[np.int64]]) -> RankMap:
    import numpy as np

    number = np.full(grid.world_size, -1)
    number[groups[by]] = np.arange(len(groups[by]))[:, None]
    ranks, stride, columns = np.arange(grid.world_size), 1, {}
    for axis, size in zip(grid.axes, grid.sizes, strict=True):
        if size > 1:
            columns[axis[0]] = (ranks // stride % size).tolist()
        stride *= size
    labels = ["".join(map(str.__add__, columns, map(str, row))) for row in zip(*columns.values(), strict=True)]
    return RankMap(title, by, tuple(labels) or ("",) * grid.world_size, tuple(number.tolist()))
