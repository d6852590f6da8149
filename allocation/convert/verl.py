"""verl: Hydra overrides or YAML. Trainers share one pool of GPUs, with the rollout or beside it.

Keys as in `verl/trainer/config/`. siiRL and Trinity-RFT took over the engine settings; what differs is a `Dialect`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from allocation.convert.drafts import Draft, engines, join, pool
from allocation.convert.settings import Reading, number
from allocation.convert.system import System
from allocation.diagnostics import Finding
from allocation.gpus import meet, union
from allocation.plan import EnginePlan, ParallelSizes, Plan

MEGATRON = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
_ULYSSES = "ulysses_sequence_parallel_size"
_ROLLOUT = "actor_rollout_ref.rollout"
TRAINER_ROLES = {"actor": "actor_rollout_ref.actor", "critic": "critic", "ref": "actor_rollout_ref.ref"}
_STRATEGIES = {"megatron": "megatron", "fsdp": "fsdp", "fsdp2": "fsdp"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """Where a system of this family differs: the place of the engines' settings, and what is left out means.

    `etp_follows_tp`: ETP left out is TP, as in Megatron, else 1. `ref_follows_actor`: sizes of the reference that are
    left out are the actor's, else 1. `rollout_tp`: the rollout's tensor parallelism when it is left out.
    """

    title: str
    prefix: str = ""
    etp_follows_tp: bool = True
    ref_follows_actor: bool = True
    rollout_tp: int = 1


def trainers(reading: Reading, dialect: Dialect) -> Iterator[tuple[str, str, ParallelSizes]]:
    """Role, backend and sizes (without `dp`) of every trainer that the settings speak of."""
    actor = ("fsdp", ParallelSizes())
    for role, place in TRAINER_ROLES.items():
        base = dialect.prefix + place
        if reading.has(f"{base}.strategy", f"{base}.{_ULYSSES}", *(f"{base}.megatron.{k}" for k in MEGATRON.values())):
            follows = role == "ref" and dialect.ref_follows_actor
            yield role, *_trainer(reading, base, dialect, actor if follows else (actor[0], ParallelSizes()))
        elif role == "actor" and reading.has(f"{dialect.prefix}actor_rollout_ref.actor", "model_engine"):
            yield role, *_trainer(reading, base, dialect, actor)
        if role == "actor":
            actor = _trainer(Reading(reading.text, reading.settings, reading.variables), base, dialect, actor)


def _trainer(
    reading: Reading, base: str, dialect: Dialect, default: tuple[str, ParallelSizes]
) -> tuple[str, ParallelSizes]:
    """Backend and sizes of one trainer; `default` has what is left out."""
    backend, sizes = default
    strategy = reading.find(f"{base}.strategy", "model_engine", "trainer.trainer_strategy")
    if reading.has(f"{base}.megatron") and strategy is None:
        backend = "megatron"
    elif strategy:
        backend = _STRATEGIES.get(strategy.value, "")
        if not backend:
            reading.report(backend=strategy)
            backend = default[0]
    if backend == "fsdp":
        shards = reading.find(f"{base}.fsdp_config.fsdp_size")
        if shards and shards.value != "-1":
            reading.report(unread=shards, reason="an allocation does not say how parameters are sharded")
        return backend, ParallelSizes(cp=reading.size(f"{base}.{_ULYSSES}", default=sizes.cp))
    got = {
        name: reading.size(f"{base}.megatron.{key}", default=getattr(sizes, name))
        for name, key in MEGATRON.items()
        if name != "etp"
    }
    # With EP 1 nothing says that the model has experts: ETP is left alone then.
    follows = got["tp"] if dialect.etp_follows_tp and got["ep"] > 1 else 1
    if reading.has(f"{base}.megatron.{MEGATRON['etp']}"):
        got["etp"] = reading.size(f"{base}.megatron.{MEGATRON['etp']}")
    else:
        got["etp"] = sizes.etp if sizes.ep > 1 else follows
    return backend, ParallelSizes(**got)


def with_data_parallel(
    reading: Reading, role: str, sizes: ParallelSizes, n_gpus: int, key: str | None = None
) -> ParallelSizes:
    """The sizes with `dp` from the number of GPUs; `key` is the setting to point at when they do not divide."""
    replica = sizes.tp * sizes.pp * sizes.cp
    if n_gpus % replica:
        reading.report(role=role, n_gpus=n_gpus, replica=replica, setting=reading.find(key) if key else None)
    return replace(sizes, dp=max(1, n_gpus // replica))


def smallest_pool(found: list[tuple[str, str, ParallelSizes]]) -> int:
    """The fewest GPUs on which all of the engines fit together."""
    return math.lcm(*(s.pp * math.lcm(s.tp * s.cp, s.etp * s.ep) for _, _, s in found), 1)


def reader(dialect: Dialect, text: str) -> tuple[str, list[Finding]]:
    """The allocation of settings whose engines share `trainer.nnodes` · `trainer.n_gpus_per_node` GPUs."""
    reading = Reading.of_config(text)
    found = list(trainers(reading, dialect))
    rollout = _rollout(reading, dialect)
    if not reading.settings or not (found or rollout):
        if not reading.findings:
            reading.report(title=dialect.title, expected="for example actor_rollout_ref.actor.strategy=megatron")
        return "", reading.findings
    nodes_key, gpus_key = "trainer.nnodes", "trainer.n_gpus_per_node"
    n_gpus = reading.size(nodes_key) * reading.size(gpus_key, default=0)
    own = _own_pool(reading, rollout) if rollout else 0
    if not n_gpus:
        n_gpus = smallest_pool(found + ([] if own or not rollout else [rollout]))
        reading.report(where=f"{nodes_key} and {gpus_key}", smallest=n_gpus)
    shared = [
        Draft(role, backend, with_data_parallel(reading, role, sizes, n_gpus, gpus_key))
        for role, backend, sizes in found
    ]
    if not rollout:
        return join([shared]), reading.findings
    role, backend, sizes = rollout
    server = Draft(role, backend, with_data_parallel(reading, role, sizes, own or n_gpus, gpus_key))
    return join([[server], shared] if own and shared else [[server, *shared]]), reading.findings


def _rollout(reading: Reading, dialect: Dialect) -> tuple[str, str, ParallelSizes] | None:
    """Role, backend and sizes (without `dp`) of the rollout, None when the settings do not speak of one."""
    tp_key = f"{_ROLLOUT}.tensor_model_parallel_size"
    if not reading.has(f"{_ROLLOUT}.name", tp_key):
        return None
    name = reading.find(f"{_ROLLOUT}.name")
    backend = name.value if name else "vllm"
    if name and backend not in ("vllm", "sglang"):
        reading.report(backend=name)
        backend = "vllm"
    inside = reading.find(f"{_ROLLOUT}.data_parallel_size")
    if inside and inside.value != "1":
        reading.report(unread=inside, reason="it groups GPUs inside a server, for which an allocation has no letter")
    ep_key = f"{_ROLLOUT}.expert_parallel_size"
    ep = reading.size(ep_key)
    if ep > 1 and backend == "vllm":
        reading.report(unread=reading.find(ep_key), reason="vllm has no letter e in an allocation")
        ep = 1
    pp = reading.size(f"{_ROLLOUT}.pipeline_model_parallel_size")
    return "rollout", backend, ParallelSizes(tp=reading.size(tp_key, default=dialect.rollout_tp), pp=pp, ep=ep)


def _own_pool(reading: Reading, rollout: tuple[str, str, ParallelSizes]) -> int:
    """GPUs that the rollout has for itself, 0 when it shares the trainers'."""
    for base in ("rollout", _ROLLOUT):
        nodes, gpus = f"{base}.nnodes", f"{base}.n_gpus_per_node"
        if number(reading.value(nodes) or "0") != 0:
            own = reading.size(nodes) * reading.size(gpus, "trainer.n_gpus_per_node", default=0)
            if not own:
                own = smallest_pool([rollout])
                reading.report(where=gpus, smallest=own)
            return own
    return 0


def read(text: str) -> tuple[str, list[Finding]]:
    """The engines of verl's settings."""
    return reader(_VERL, text)


def trainer_settings(engine: EnginePlan, dialect: Dialect) -> Iterator[tuple[str, object]]:
    """Settings of one trainer, every size written out."""
    base = dialect.prefix + TRAINER_ROLES[engine.role]
    yield f"{base}.strategy", engine.backend
    if engine.backend == "fsdp":
        yield f"{base}.{_ULYSSES}", engine.sizes.cp
        return
    for name, key in MEGATRON.items():
        size = getattr(engine.sizes, name)
        if name != "vpp" or size > 1:
            yield f"{base}.megatron.{key}", size
    yield f"{base}.megatron.sequence_parallel", engine.sequence_parallel


def settings(plan: Plan, dialect: Dialect, *, own_pool: bool) -> dict[str, object]:
    """Settings of the plan's engines; `own_pool`: the rollout may have GPUs of its own."""
    chosen = [engine for engine in engines(plan, kind="trainer") if engine.role in TRAINER_ROLES]
    servers = [engine for engine in engines(plan, kind="server") if engine.role == "rollout"]
    if not chosen and not servers:
        return {}
    written: dict[str, object] = {}
    apart = own_pool and chosen and servers and not meet(union(e.gpus for e in chosen), union(e.gpus for e in servers))
    per = plan.cluster.n_gpus_per_node
    shared = pool(union(e.gpus for e in chosen or servers), per)
    written |= {"trainer.nnodes": shared.nodes, "trainer.n_gpus_per_node": shared.per_node}
    for engine in chosen:
        written |= dict(trainer_settings(engine, dialect))
    for engine in servers:
        s = engine.sizes
        written |= {f"{_ROLLOUT}.name": engine.backend, f"{_ROLLOUT}.tensor_model_parallel_size": s.tp}
        if s.pp > 1:
            written[f"{_ROLLOUT}.pipeline_model_parallel_size"] = s.pp
        if s.ep > 1:
            written[f"{_ROLLOUT}.expert_parallel_size"] = s.ep
    if apart:
        own = pool(union(e.gpus for e in servers), per)
        written |= {"actor_rollout_ref.hybrid_engine": False}
        written |= {f"{_ROLLOUT}.nnodes": own.nodes, f"{_ROLLOUT}.n_gpus_per_node": own.per_node}
    return written


def lines(written: dict[str, object]) -> str:
    """Settings as Hydra overrides, one per line."""
    return "".join(f"{key}={value}\n" for key, value in written.items())


def write(plan: Plan) -> str:
    """Hydra overrides; a rollout on GPUs of its own gets verl's separate pool."""
    return lines(settings(plan, _VERL, own_pool=True))


_VERL = Dialect("verl", rollout_tp=2)
ONE_POOL = {
    "CONVERT-LOSES-ENGINE": "the engines here are actor, rollout, critic and ref",
    "CONVERT-LOSES-SIZE": "data parallelism is what the shared GPUs leave; fsdp has no tensor parallelism here",
    "CONVERT-LOSES-GPUS": "trainers share one pool of GPUs, equally many on every node; ids are Ray's choice",
}
SYSTEM = System("verl", "verl", read, write, ONE_POOL, even="each")
