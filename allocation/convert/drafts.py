"""Engines on their way to an allocation string, and how many nodes and GPUs a plan's engines take."""

import math
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace

from allocation.backends import BACKENDS, DEFAULT_ROLE, ROLE_ORDER, SERVER
from allocation.convert.settings import Reading
from allocation.gpus import Gpus, n_gpus
from allocation.language.spelling import dims, gpu_ranges, spell
from allocation.language.syntax import Allocation, Dim, Group, Layout, Member, Word
from allocation.plan import EnginePlan, ParallelSizes, Plan

COUNTED_ONE_BY_ONE = 1 << 16


@dataclass(frozen=True, slots=True)
class Draft:
    """An engine as read. `gpus` are explicit ids in rank order, empty if the compiler places the engine."""

    role: str
    backend: str
    sizes: ParallelSizes
    gpus: Gpus = ()

    @property
    def layout(self) -> Layout:
        """The dimensions; with expert parallelism, a folded layout that makes ETP explicit."""
        s = self.sizes
        attn = {"d": s.dp, "p": s.pp, "t": s.tp, "c": s.cp}
        if BACKENDS[self.backend].kind == SERVER:
            return Layout(dims(attn | {"e": s.ep}))
        attn |= {"v": s.vpp}
        if s.ep == s.etp == 1:
            return Layout(dims(attn))
        world, block = s.dp * s.per_replica, s.etp * s.ep * s.pp
        derived = {"d": world // block} if world % block == 0 else {}
        ffn = (*dims(derived | {"p": s.pp}), Dim("t", str(s.etp)), Dim("e", str(s.ep)))
        return Layout(dims(attn), ffn)


def names_needed(engines: Iterable[tuple[str, str]]) -> bool:
    """Return whether the (role, backend) pairs need names: without them a lone trainer is the actor, a lone server
    rollout."""
    pairs = list(engines)
    kinds = [BACKENDS[backend].kind if backend in BACKENDS else backend for _, backend in pairs]
    plain = all(role == DEFAULT_ROLE.get(kind) for (role, _), kind in zip(pairs, kinds, strict=True))
    return not plain or len(set(kinds)) < len(pairs)


def join(groups: Sequence[Sequence[Draft]]) -> str:
    """Return the allocation of colocated groups."""
    named = names_needed((draft.role, draft.backend) for group in groups for draft in group)

    def member(draft: Draft) -> Member:
        return Member(Word(draft.backend), draft.layout, Word(draft.role) if named else None, gpu_ranges(draft.gpus))

    return spell(Allocation(tuple(Group(tuple(map(member, group))) for group in groups)))


def fill_data_parallel(
    reading: Reading, role: str, backend: str, sizes: ParallelSizes, n_gpus: int, key: str, gpus: Gpus = ()
) -> Draft:
    """Return the engine with the data parallelism that follows from `n_gpus`, set by `key`; report a remainder."""
    replica = sizes.per_replica
    if n_gpus % replica:
        reading.report(role=role, n_gpus=n_gpus, replica=replica, setting=reading.find(key))
    return Draft(role, backend, replace(sizes, dp=max(1, n_gpus // replica)), gpus)


def engines(
    plan: Plan, roles: Container[str] | None = None, *, backends: Container[str] = BACKENDS
) -> list[EnginePlan]:
    """Return the engines of `plan` with one of `roles` (None: any) and `backends`, the well-known roles first."""
    chosen = [e for e in plan.engines if (roles is None or e.role in roles) and e.backend in backends]
    return sorted(chosen, key=lambda engine: (*ROLE_ORDER, engine.role).index(engine.role))


@dataclass(frozen=True, slots=True)
class GpuPool:
    """GPUs as other systems count them; `even` if every node contributes exactly `per_node` of them."""

    nodes: int
    per_node: int
    even: bool


def pool(gpus: Sequence[range], n_gpus_per_node: int) -> GpuPool:
    """Return nodes and GPUs per node of the ids; if nodes have different numbers, the nearest equal split."""
    total = n_gpus(gpus)
    if total <= COUNTED_ONE_BY_ONE:
        counts = Counter(gpu // n_gpus_per_node for ids in gpus for gpu in ids)
        if len(set(counts.values())) == 1:
            return GpuPool(len(counts), total // len(counts), even=True)
    elif len(gpus) == 1 and gpus[0].start % n_gpus_per_node == 0 == total % n_gpus_per_node:
        return GpuPool(total // n_gpus_per_node, n_gpus_per_node, even=True)
    nodes = math.ceil(total / n_gpus_per_node)
    while total % nodes and nodes < min(total, COUNTED_ONE_BY_ONE):
        nodes += 1
    return GpuPool(nodes, total // nodes, even=False) if total % nodes == 0 else GpuPool(total, 1, even=False)
