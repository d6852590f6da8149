"""ROLL: YAML with one section per role, its `strategy_args` and its `device_mapping`.

ROLL's configuration guide defines the keys. ROLL evaluates a device mapping as Python; here a grammar of its own parses
it. Roles with overlapping mappings share GPUs.

mapping = term { "+" term } ; term = "[" ints "]" | ["list" "("] "range" "(" ints ")" [")"]
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from allocation.compiler import Context, judge
from allocation.convert.drafts import Draft, engines, fill_data_parallel, join
from allocation.convert.megatron import MEGATRON, megatron_config
from allocation.convert.settings import Reading, Setting, dump, number
from allocation.convert.system import System
from allocation.diagnostics import Finding
from allocation.gpus import meet, merge, n_gpus
from allocation.plan import EnginePlan, ParallelSizes, Plan

MOST_GPUS = 1 << 17
_TERM = re.compile(r"\[([\d,\s]*)\]|(list\s*\(\s*)?range\s*\(([\d,\s]*)\)\s*(\))?")


def read_devices(text: str) -> tuple[range, ...]:
    """Return the ids in order, as ranges. Raises `ValueError` with the reason."""
    text = text.strip()
    ids: list[range] = []
    position = 0
    while True:
        term = _TERM.match(text, position)
        if not term or bool(term[2]) != bool(term[4]):
            raise ValueError(
                f"unsupported expression `{text[position : position + 20]}`" if text else "the mapping is empty"
            )
        ids += _single_ranges(_gpu_numbers(term[1])) if term[1] is not None else [_read_range(term[3])]
        if n_gpus(ids) > MOST_GPUS:
            raise ValueError(f"the mapping has more than {MOST_GPUS} ids")
        rest = text[term.end() :].lstrip()
        if not rest:
            break
        if rest[0] != "+":
            raise ValueError(f"unsupported expression `{rest[:20]}`")
        position = len(text) - len(rest[1:].lstrip())
    runs = merge(run for part in ids for run in ([part] if part.step == 1 else _single_ranges(part)))
    if not runs:
        raise ValueError("the mapping is empty")
    ends = sorted((run.start, run.stop) for run in runs)
    for (_, stop), (start, _) in pairwise(ends):
        if start < stop:
            raise ValueError(f"GPU {start} appears twice")
    return runs


def show_devices(gpus: Sequence[range]) -> str:
    """Return the ids as ROLL writes them."""
    return " + ".join(f"list(range({ids.start},{ids.stop}))" for ids in gpus)


def _gpu_numbers(text: str) -> list[int]:
    values = [number(part.strip()) for part in text.split(",")] if text.strip() else []
    if None in values:
        raise ValueError("an id is a number from 0, and commas stand between them")
    return [value for value in values if value is not None]


def _single_ranges(ids: Iterable[int]) -> list[range]:
    return [range(gpu, gpu + 1) for gpu in ids]


def _read_range(text: str) -> range:
    bounds = _gpu_numbers(text)
    if not 1 <= len(bounds) <= 3 or (len(bounds) == 3 and bounds[2] == 0):
        raise ValueError(f"`range({text})` needs one to three numbers, the third at least 1")
    ids = range(*bounds)
    if ids.stop - ids.start > MOST_GPUS * ids.step:
        raise ValueError(f"the mapping has more than {MOST_GPUS} ids")
    return ids


ROLES = {"rollout": "actor_infer", "actor": "actor_train", "critic": "critic", "ref": "reference"}
_STRATEGIES = {
    "megatron_train": "megatron", "megatron_infer": "megatron", "fsdp2_train": "fsdp", "fsdp2_infer": "fsdp",
    "sglang": "sglang", "vllm": "vllm",
}  # fmt: skip
_ULYSSES = "ulysses_size"


def read(text: str) -> tuple[str, list[Finding]]:
    """Return the engines of a ROLL configuration, with explicit GPU ids if the order of the roles does not imply
    them."""
    reading = Reading.of_config(text)
    drafts = []
    for role, section in ROLES.items():
        if mapping := reading.find(f"{section}.device_mapping"):
            drafts += _engine(reading, role, section, mapping)
    if not drafts:
        reading.nothing("ROLL", "a role such as actor_train with its device_mapping")
    for key, setting in reading.settings.items():
        section, _, last = key.rpartition(".")
        if last == "device_mapping" and section not in ROLES.values() and setting.value:
            reading.report(unread=setting, reason=f"an allocation has no engine for ROLL's `{section}`")
    return (_arrange(drafts) if drafts else ""), reading.findings


def _engine(reading: Reading, role: str, section: str, mapping: Setting) -> list[Draft]:
    """Return the engine of one section, none if its GPUs or its strategy cannot be read."""
    strategy_key = f"{section}.strategy_args.strategy_name"
    strategy = reading.find(strategy_key)
    try:
        gpus = read_devices(mapping.value)
    except ValueError as error:
        if "$" in mapping.value:
            reading.report(size=mapping)
        else:
            reading.report(devices=mapping, reason=str(error))
        return []
    if strategy is None:
        reading.report(key=strategy_key, near=mapping, help=f"one of {', '.join(_STRATEGIES)}")
        return []
    if strategy.value not in _STRATEGIES:
        reading.report(backend=strategy)
        return []
    backend, config = _STRATEGIES[strategy.value], f"{section}.strategy_args.strategy_config"
    if backend in ("sglang", "vllm"):
        sizes = _server(reading, backend, section, config)
    elif backend == "fsdp":
        sizes = ParallelSizes(cp=reading.size(f"{config}.{_ULYSSES}"))
    else:
        sizes = reading.sizes({name: f"{config}.{key}" for name, key in MEGATRON.items()})
        if not reading.has(f"{config}.{MEGATRON['etp']}") and sizes.ep > 1:
            sizes = replace(sizes, etp=sizes.tp)
    return [fill_data_parallel(reading, role, backend, sizes, n_gpus(gpus), mapping.key, gpus)]


def _server(reading: Reading, backend: str, section: str, config: str) -> ParallelSizes:
    """Return a server with the GPUs of one worker, or with the GPUs of its own configuration."""
    worker = reading.size(f"{section}.num_gpus_per_worker")
    pp = reading.size(f"{config}.pp_size", f"{config}.pipeline_parallel_size")
    tp = reading.size(f"{config}.tp_size", f"{config}.tensor_parallel_size", default=max(1, worker // pp))
    ep = reading.size(f"{config}.ep_size", f"{config}.expert_parallel_size")
    if ep > 1 and backend == "vllm":
        reading.report(unread=reading.find(f"{config}.ep_size"), reason="vllm has no letter e in an allocation")
        ep = 1
    return ParallelSizes(tp=tp, pp=pp, ep=ep)


def _arrange(drafts: list[Draft]) -> str:
    """Return the allocation: roles that share a GPU in one group, ids only where they are needed."""
    groups: list[list[Draft]] = []
    for draft in drafts:
        meeting = [group for group in groups if any(meet(draft.gpus, other.gpus) for other in group)]
        groups = [group for group in groups if group not in meeting]
        groups.append([*(other for group in meeting for other in group), draft])
    groups.sort(key=lambda group: min(ids.start for draft in group for ids in draft.gpus))
    with_ids = join(groups)
    without = join([[Draft(draft.role, draft.backend, draft.sizes) for draft in group] for group in groups])
    plan = judge(without, Context()).plan
    wanted = {draft.role: merge(draft.gpus) for draft in drafts}
    same = plan and {engine.role: merge(engine.gpus) for engine in plan.engines} == wanted
    return without if same else with_ids


def write(plan: Plan) -> str:
    """Return YAML with the roles' strategies and device mappings, and the GPUs of a node."""
    tree = {ROLES[engine.role]: _section(engine) for engine in engines(plan, ROLES)}
    return dump({"num_gpus_per_node": plan.cluster.n_gpus_per_node, **tree}) if tree else ""


def _section(engine: EnginePlan) -> dict[str, Any]:
    s = engine.sizes
    worker = {}
    config: dict[str, object]
    if engine.kind == "server":
        name, config = engine.backend, {"ep_size": s.ep} if s.ep > 1 else {}
        if s.pp > 1:
            config |= {"pp_size": s.pp} if engine.backend == "sglang" else {"pipeline_parallel_size": s.pp}
        worker = {"num_gpus_per_worker": s.per_replica}
    elif engine.backend == "fsdp":
        name, config = "fsdp2_train", {_ULYSSES: s.cp}
    else:
        name, config = "megatron_infer" if engine.role == "ref" else "megatron_train", megatron_config(engine)
    return {
        "strategy_args": {"strategy_name": name, "strategy_config": config},
        **worker,
        "device_mapping": show_devices(merge(engine.gpus)),
    }


SYSTEM = System(
    "roll",
    "ROLL",
    read,
    write,
    {
        "CONVERT-LOSES-ENGINE": "the roles of ROLL are actor_train, actor_infer, critic and reference",
        "CONVERT-LOSES-SIZE": "fsdp has no tensor parallelism in ROLL",
    },
)
