"""verl: Hydra overrides or YAML. Trainers share one pool of GPUs, with the rollout or beside it.

`verl/trainer/config/` defines the keys. siiRL and Trinity-RFT use the same engine settings; a `VerlDialect` holds the
differences.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from allocation.backends import SERVER, TRAINER
from allocation.convert.drafts import engines, fill_data_parallel, join, pool
from allocation.convert.megatron import MEGATRON, megatron_config
from allocation.convert.settings import Reading, number
from allocation.convert.system import System
from allocation.diagnostics import Finding
from allocation.gpus import meet, union
from allocation.plan import EnginePlan, ParallelSizes, Plan

_ULYSSES = "ulysses_sequence_parallel_size"
_ROLLOUT = "actor_rollout_ref.rollout"
TRAINER_ROLES = {"actor": "actor_rollout_ref.actor", "critic": "critic", "ref": "actor_rollout_ref.ref"}
_STRATEGIES = {"megatron": "megatron", "fsdp": "fsdp", "fsdp2": "fsdp"}
# Role, backend and sizes (without `dp`).
Found = tuple[str, str, ParallelSizes]


@dataclass(frozen=True, slots=True)
class VerlDialect:
    """Differences between the systems of this family: the section of the engines' settings, and the defaults of omitted
    keys.

    `etp_follows_tp`: an omitted ETP is TP, as in Megatron, else 1. `ref_follows_actor`: omitted sizes of the reference
    are the actor's, else 1. `rollout_tp`: the default of the rollout's tensor parallelism. `own_pool`: the rollout may
    have separate GPUs.
    """

    title: str
    prefix: str = ""
    etp_follows_tp: bool = True
    ref_follows_actor: bool = True
    rollout_tp: int = 1
    own_pool: bool = False


def trainers(reading: Reading, dialect: VerlDialect) -> Iterator[Found]:
    """Yield role, backend and sizes (without `dp`) of every trainer that the settings speak of."""
    actor = ("fsdp", ParallelSizes())
    for role, place in TRAINER_ROLES.items():
        base = dialect.prefix + place
        if reading.has(f"{base}.strategy", f"{base}.{_ULYSSES}", *(f"{base}.megatron.{k}" for k in MEGATRON.values())):
            follows = role == "ref" and dialect.ref_follows_actor
            yield role, *_trainer(reading, base, dialect, actor if follows else (actor[0], ParallelSizes()))
        elif role == "actor" and reading.has(f"{dialect.prefix}actor_rollout_ref.actor", "model_engine"):
            yield role, *_trainer(reading, base, dialect, actor)
        if role == "actor":
            actor = _trainer(Reading(reading.text, reading.settings), base, dialect, actor)


def _trainer(
    reading: Reading, base: str, dialect: VerlDialect, default: tuple[str, ParallelSizes]
) -> tuple[str, ParallelSizes]:
    """Return backend and sizes of one trainer; `default` has the omitted sizes."""
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
            reading.report(unread=shards, reason="an allocation does not define how parameters are sharded")
        return backend, ParallelSizes(cp=reading.size(f"{base}.{_ULYSSES}", default=sizes.cp))
    got = reading.sizes({name: f"{base}.megatron.{key}" for name, key in MEGATRON.items()}, sizes)
    # With EP 1 the model may have no experts, so ETP is not read.
    if sizes.ep == 1 and not reading.has(f"{base}.megatron.{MEGATRON['etp']}"):
        got = replace(got, etp=got.tp if dialect.etp_follows_tp and got.ep > 1 else 1)
    return backend, got


def smallest_pool(found: list[Found]) -> int:
    """Return the fewest GPUs on which all of the engines fit together."""
    return math.lcm(*(sizes.smallest_world for _, _, sizes in found), 1)


def reader(dialect: VerlDialect, text: str) -> tuple[str, list[Finding]]:
    """Return the allocation of settings whose engines share `trainer.nnodes` · `trainer.n_gpus_per_node` GPUs."""
    reading = Reading.of_config(text)
    found = list(trainers(reading, dialect))
    rollout = _rollout(reading, dialect)
    if not reading.settings or not (found or rollout):
        return reading.nothing(dialect.title, "for example actor_rollout_ref.actor.strategy=megatron")
    nodes_key, gpus_key = "trainer.nnodes", "trainer.n_gpus_per_node"
    n_gpus = reading.size(nodes_key) * reading.size(gpus_key, default=0)
    own = _own_pool(reading, rollout) if rollout else 0
    if not n_gpus:
        n_gpus = smallest_pool(found + ([] if own or not rollout else [rollout]))
        reading.report(where=f"{nodes_key} and {gpus_key}", smallest=n_gpus)
    shared = [fill_data_parallel(reading, *engine, n_gpus, gpus_key) for engine in found]
    if not rollout:
        return join([shared]), reading.findings
    server = fill_data_parallel(reading, *rollout, own or n_gpus, gpus_key)
    return join([[server], shared] if own and shared else [[server, *shared]]), reading.findings


def _rollout(reading: Reading, dialect: VerlDialect) -> Found | None:
    """Return role, backend and sizes (without `dp`) of the rollout, None when the settings do not speak of one."""
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
        reading.report(unread=inside, reason="it groups GPUs inside a server; an allocation has no letter for that")
    ep_key = f"{_ROLLOUT}.expert_parallel_size"
    ep = reading.size(ep_key)
    if ep > 1 and backend == "vllm":
        reading.report(unread=reading.find(ep_key), reason="vllm has no letter e in an allocation")
        ep = 1
    pp = reading.size(f"{_ROLLOUT}.pipeline_model_parallel_size")
    return "rollout", backend, ParallelSizes(tp=reading.size(tp_key, default=dialect.rollout_tp), pp=pp, ep=ep)


def _own_pool(reading: Reading, rollout: Found) -> int:
    """Return the GPUs reserved for the rollout, 0 if it shares the trainers' GPUs."""
    for base in ("rollout", _ROLLOUT):
        nodes, gpus = f"{base}.nnodes", f"{base}.n_gpus_per_node"
        if number(reading.value(nodes) or "0") != 0:
            own = reading.size(nodes) * reading.size(gpus, "trainer.n_gpus_per_node", default=0)
            if not own:
                own = smallest_pool([rollout])
                reading.report(where=gpus, smallest=own)
            return own
    return 0


def trainer_settings(trainers: list[EnginePlan], dialect: VerlDialect) -> dict[str, object]:
    """Return settings of trainers, every size written out."""
    written: dict[str, object] = {}
    for engine in trainers:
        base = dialect.prefix + TRAINER_ROLES[engine.role]
        written[f"{base}.strategy"] = engine.backend
        if engine.backend == "fsdp":
            written[f"{base}.{_ULYSSES}"] = engine.sizes.cp
        else:
            written |= {f"{base}.megatron.{key}": value for key, value in megatron_config(engine).items()}
    return written


def trainers_of(plan: Plan) -> list[EnginePlan]:
    """Return the plan's trainers that verl's settings can express."""
    return [engine for engine in engines(plan, TRAINER_ROLES) if engine.kind == TRAINER]


def rollouts(plan: Plan) -> list[EnginePlan]:
    """Return the plan's rollout servers."""
    return [engine for engine in engines(plan, ["rollout"]) if engine.kind == SERVER]


def count_gpus(engines: list[EnginePlan], nodes: str, per_node: str) -> dict[str, object]:
    """Return the settings `nodes` and `per_node` for the GPUs of the engines together."""
    gpus = pool(union(engine.gpus for engine in engines), engines[0].n_gpus_per_node)
    return {nodes: gpus.nodes, per_node: gpus.per_node}


def writer(dialect: VerlDialect, plan: Plan) -> str:
    """Return Hydra overrides, one per line."""
    chosen, servers = trainers_of(plan), rollouts(plan)
    if not chosen and not servers:
        return ""
    written = count_gpus(chosen or servers, "trainer.nnodes", "trainer.n_gpus_per_node")
    written |= trainer_settings(chosen, dialect)
    for engine in servers:
        s = engine.sizes
        written |= {f"{_ROLLOUT}.name": engine.backend, f"{_ROLLOUT}.tensor_model_parallel_size": s.tp}
        written |= {f"{_ROLLOUT}.pipeline_model_parallel_size": s.pp} if s.pp > 1 else {}
        written |= {f"{_ROLLOUT}.expert_parallel_size": s.ep} if s.ep > 1 else {}
    if dialect.own_pool and chosen and servers and not meet(*(union(e.gpus for e in es) for es in (chosen, servers))):
        written |= {"actor_rollout_ref.hybrid_engine": False}
        written |= count_gpus(servers, f"{_ROLLOUT}.nnodes", f"{_ROLLOUT}.n_gpus_per_node")
    return "".join(f"{key}={value}\n" for key, value in written.items())


def system(name: str, dialect: VerlDialect) -> System:
    """Return the system of a dialect whose settings are Hydra overrides and whose trainers share one pool of GPUs."""
    return System(name, dialect.title, partial(reader, dialect), partial(writer, dialect), _ONE_POOL, even="each")


_ONE_POOL = {
    "CONVERT-LOSES-ENGINE": "the engines are actor, rollout, critic and ref",
    "CONVERT-LOSES-SIZE": "data parallelism follows from the shared GPUs; fsdp has no tensor parallelism here",
    "CONVERT-LOSES-GPUS": "trainers share one pool of GPUs, equally many on every node; Ray chooses the ids",
}
SYSTEM = system("verl", VerlDialect("verl", rollout_tp=2, own_pool=True))
# siiRL (`siirl/params/model_args.py`) has one pool of GPUs, and neither ETP nor the reference follows other settings.
SIIRL = system("siirl", VerlDialect("siiRL", etp_follows_tp=False, ref_follows_actor=False))
