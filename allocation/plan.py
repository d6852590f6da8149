"""The plan: which engines run, on which GPUs, in which groups. Immutable; to and from JSON.

A plan exists only for an allocation without errors. Potentially long values (devices, rank groups) are computed on
demand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from allocation.backends import SERVER, TRAINER
from allocation.gpus import Gpus, n_gpus, union
from allocation.grid import RankGrid
from allocation.notebook import render_html

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

VERSION = 1
_PLAIN = ("role", "backend", "kind", "text")

_DENSE = ("tp", "cp", "dp", "dp-cp", "pp", "tp-pp", "tp-cp", "tp-dp", "tp-dp-cp")
_EXPERT = ("ep", "etp", "etp-ep", "etp-ep-pp", "edp")
# The axes of each group, in the dense grid and in the experts', where `tp` is ETP and `dp` is EDP.
DENSE_GROUPS = {name: tuple(name.split("-")) for name in _DENSE}
EXPERT_GROUPS = {name: tuple(name.replace("et", "t").replace("ed", "d").split("-")) for name in _EXPERT}


class Device(NamedTuple):
    """A GPU: node and index on that node, both from 0."""

    node: int
    gpu: int


@dataclass(frozen=True, slots=True)
class Cluster:
    """`n_nodes` machines with `n_gpus_per_node` GPUs each; GPU id = node · n_gpus_per_node + gpu."""

    n_nodes: int
    n_gpus_per_node: int = 8

    def __post_init__(self) -> None:
        if self.n_nodes < 1 or self.n_gpus_per_node < 1:
            raise ValueError(f"a cluster has at least one node with one GPU, not {self}")

    @property
    def n_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.n_nodes * self.n_gpus_per_node

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Return the cluster of a text: `4x8` is four nodes with eight GPUs. Raises `ValueError`."""
        nodes, x, gpus = text.strip().lower().partition("x")
        if not (x and nodes.isdecimal() and gpus.isdecimal() and len(text) < 40):
            raise ValueError(f"a cluster is written NODESxGPUS, for example 4x8, not {text!r}")
        return cls(int(nodes), int(gpus))

    def __str__(self) -> str:
        return f"{self.n_nodes}x{self.n_gpus_per_node}"


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Sizes of an engine. `dp` of a server is its number of replicas; `edp` is derived."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    edp: int = 1
    vpp: int = 1

    @property
    def per_replica(self) -> int:
        """GPUs of one replica."""
        return self.tp * self.pp * self.cp

    @property
    def smallest_world(self) -> int:
        """Fewest GPUs on which both grids fit."""
        return self.pp * math.lcm(self.tp * self.cp, self.etp * self.ep)


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """One replica of a server: its number and the GPUs it runs on."""

    index: int
    devices: tuple[Device, ...]


@dataclass(frozen=True)
class EnginePlan:
    """One engine: its role, how it is parallelised and its GPUs.

    `text` is the member as compiled (`d*` filled in). `gpus` are GPU ids in rank order, as ranges. `order` is
    Megatron's rank order.
    """

    role: str
    backend: str
    kind: str
    text: str
    sizes: ParallelSizes
    gpus: Gpus
    n_gpus_per_node: int
    order: str

    @property
    def world_size(self) -> int:
        """Number of ranks, one per GPU; for servers all replicas together."""
        return self.sizes.dp * self.sizes.per_replica

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The GPU of every rank, in rank order."""
        return tuple(Device(*divmod(gpu, self.n_gpus_per_node)) for gpus in self.gpus for gpu in gpus)

    @cached_property
    def servers(self) -> tuple[ServerPlan, ...]:
        """The replicas of a server engine, none for a trainer."""
        if self.kind != SERVER:
            return ()
        size = self.sizes.per_replica
        return tuple(ServerPlan(i, self.devices[i * size : (i + 1) * size]) for i in range(self.sizes.dp))

    @cached_property
    def dense(self) -> RankGrid:
        """The grid of attention and dense layers (Megatron-LM core/parallel_state.py:859)."""
        return RankGrid.from_order(self.order, asdict(self.sizes) | {"ep": 1})

    @cached_property
    def expert(self) -> RankGrid | None:
        """The grid of the experts (core/parallel_state.py:888): its `tp` is ETP, its `dp` EDP. Megatron only."""
        if self.backend != "megatron":
            return None
        s = self.sizes
        return RankGrid.from_order(self.order, {"tp": s.etp, "ep": s.ep, "dp": s.edp, "pp": s.pp})

    @property
    def sequence_parallel(self) -> bool:
        """Whether sequence parallelism is on: whenever TP exceeds 1, as MoE layers refuse to train without it
        (moe_layer.py:636)."""
        return self.kind == TRAINER and self.sizes.tp > 1

    @property
    def group_names(self) -> tuple[str, ...]:
        """The names that `groups` knows for this engine."""
        expert = tuple(EXPERT_GROUPS) if self.expert else ()
        return (*DENSE_GROUPS, "embedding", "position-embedding", *expert)

    def groups(self, name: str) -> NDArray[np.int64]:
        """Return the rank groups called `name`, `[groups, size]`, as `initialize_model_parallel` builds them.

        `embedding` has the first and last stage of each pipeline, `position-embedding` the first. Raises `KeyError` for
        a name that is not in `group_names`.
        """
        if name in DENSE_GROUPS:
            return self.dense.groups(*DENSE_GROUPS[name])
        if name in EXPERT_GROUPS and self.expert:
            return self.expert.groups(*EXPERT_GROUPS[name])
        return self.dense.groups("pp")[:, {"embedding": [0, -1][: self.sizes.pp], "position-embedding": [0]}[name]]

    def all_groups(self) -> dict[str, NDArray[np.int64]]:
        """Return every rank group by name."""
        return {name: self.groups(name) for name in self.group_names}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of `rank` in both grids: `tp cp dp pp` and, for Megatron, `etp ep edp`."""
        dense = self.dense.coordinates(rank)
        place = {axis: dense[axis] for axis in ("tp", "cp", "dp", "pp")}
        if self.expert:
            expert = self.expert.coordinates(rank)
            place |= {"etp": expert["tp"], "ep": expert["ep"], "edp": expert["dp"]}
        return place

    def _repr_html_(self) -> str:
        return render_html(self)

    def to_json(self) -> dict[str, Any]:
        """Return the engine as JSON types; GPU ids as `[first, last]` pairs."""
        fields = {name: getattr(self, name) for name in _PLAIN}
        gpus = [[gpus.start, gpus.stop - 1] for gpus in self.gpus]
        return {**fields, "sizes": asdict(self.sizes), "gpus": gpus}


@dataclass(frozen=True)
class Plan:
    """The compiled allocation. `allocation` is the string as compiled; members of one group share GPUs."""

    allocation: str
    cluster: Cluster
    engines: tuple[EnginePlan, ...]
    groups: tuple[tuple[str, ...], ...]
    order: str

    def engine(self, role: str) -> EnginePlan:
        """Return the engine with that role. Raises `KeyError`."""
        for engine in self.engines:
            if engine.role == role:
                return engine
        raise KeyError(f"the plan has no engine {role!r}; its engines are {', '.join(e.role for e in self.engines)}")

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """All GPUs in use, each once, in the order of their ids."""
        return tuple(sorted({device for engine in self.engines for device in engine.devices}))

    @cached_property
    def n_gpus(self) -> int:
        """Number of GPUs in use."""
        return n_gpus(union(engine.gpus for engine in self.engines))

    def _repr_html_(self) -> str:
        return render_html(self)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON types, with the version of the format."""
        return {
            "version": VERSION,
            "allocation": self.allocation,
            "cluster": asdict(self.cluster),
            "order": self.order,
            "groups": [list(group) for group in self.groups],
            "engines": [engine.to_json() for engine in self.engines],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Return the plan that `to_json` wrote. Raises `ValueError` for another version or a missing field."""
        if data.get("version") != VERSION:
            raise ValueError(f"unsupported plan version {data.get('version')!r}; this release reads version {VERSION}")
        try:
            cluster = Cluster(**data["cluster"])
            engines = tuple(_engine_from_json(entry, cluster, data["order"]) for entry in data["engines"])
            groups = tuple(tuple(group) for group in data["groups"])
            return cls(data["allocation"], cluster, engines, groups, data["order"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"the plan is incomplete: {error}") from error


def _engine_from_json(data: Mapping[str, Any], cluster: Cluster, order: str) -> EnginePlan:
    gpus = tuple(range(first, last + 1) for first, last in data["gpus"])
    sizes, plain = ParallelSizes(**data["sizes"]), {name: data[name] for name in _PLAIN}
    return EnginePlan(**plain, sizes=sizes, gpus=gpus, n_gpus_per_node=cluster.n_gpus_per_node, order=order)
