"""Host memory: the bytes of all processes of a run on one node, compared with this machine.

docs/memory_and_planning.md has the formula and its measurements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel

from allocation.diagnostics import Finding, Severity
from allocation.hardware import GIB
from allocation.memory import footprint
from allocation.memory.host import (
    CONTROLLER_BYTES,
    RANK_BYTES,
    SERVER_BYTES,
    HostItem,
    data_items,
    state_items,
    without_offload,
)
from allocation.memory.items import CUDA, NCCL
from allocation.memory.servers import kv_token_bytes, server_weights
from allocation.model_spec import ModelSpec
from allocation.plan import EnginePlan, Plan
from allocation.settings import ITEMS, MemorySettings, Workload
from areal_like.core.config.findings import finding
from areal_like.core.config.schema import RunConfig, TrainerRole
from areal_like.core.rollout.backends import backend_of
from areal_like.core.types import Device
from areal_like.preflight.lora import trained_share
from areal_like.preflight.machine import gpu_count
from areal_like.preflight.megatron_settings import megatron_settings
from areal_like.preflight.memory import of_trainer
from areal_like.preflight.view import Models, RoleView, view_roles

_KEY = "actor.backend"
MOST_CACHE = 0.8  # share of the machine's memory that SGLang takes for a cache, however many tokens it is asked for
SPARE = 0.9  # share of the machine's memory that a suggested change fits into


def check_host_memory(
    config: RunConfig, device: Device, plan: Plan | None, models: Models, token_bytes: int = 0
) -> Iterator[Finding]:
    """Check that this machine has memory for all processes of the run on a node, unless the run is on others.

    `token_bytes` is the size of a token's columns that servers return for capabilities.
    """
    if config.scheduler.type == "ray" or (device == "cuda" and not gpu_count()):
        return
    if plan is None or models.get("actor") is None or (sizes := machine_bytes()) is None:
        return
    total, available = sizes
    items = host_items(config, device, plan, models, total, token_bytes)
    need = sum(item.bytes for item in items)
    if need <= available:
        return
    shown = ", ".join(f"{it.name} {it.bytes / GIB:.1f}" for it in sorted(items, key=lambda it: -it.bytes)[:4])
    key = "allocation_mode" if config.allocation_mode else _KEY
    message = (
        f"the processes of a node need about {need / GIB:.1f} GiB of host memory (largest: {shown}), and this machine "
    )
    if need > total:
        help = _fix(config, device, plan, models, total)
        yield finding("RUN-HOST-MEMORY", key, f"{message}has {total / GIB:.1f} GiB", help)
    else:
        help = "end other processes, or use a smaller model"
        message += f"has {available / GIB:.1f} of {total / GIB:.1f} GiB available now"
        yield finding("RUN-HOST-MEMORY-TAKEN", key, message, help, severity=Severity.WARNING)


def host_items(
    config: RunConfig, device: Device, plan: Plan, models: Models, total: int, token_bytes: int = 0
) -> list[HostItem]:
    """Return the uses of memory on the node that needs the most; nodes have `total` bytes."""
    views = {view.role: view for view in view_roles(config, models, plan, device=device)}
    nodes: dict[int, list[HostItem]] = {}
    for engine in plan.engines:
        items = list(_engine_items(config, device, engine, views, models["actor"], total))
        here = [place.node for place in engine.devices]
        for node in {*here}:
            nodes.setdefault(node, []).extend(HostItem(item.name, item.bytes * here.count(node)) for item in items)
    first = [HostItem("controller and Ray", CONTROLLER_BYTES)]
    if (actor := models["actor"]) is not None:
        work, staleness = Workload(actor, batch=views["actor"].batch), config.rollout.max_head_offpolicyness
        first += data_items(work, staleness, token_bytes)
    worst = max(nodes.values(), key=lambda items: sum(it.bytes for it in items))
    return [item for item in (*first, *worst) if item.bytes]


def _engine_items(
    config: RunConfig,
    device: Device,
    engine: EnginePlan,
    views: Mapping[TrainerRole, RoleView],
    actor: ModelSpec | None,
    total: int,
) -> Iterator[HostItem]:
    """Yield the uses of memory by one process of an engine."""
    if (view := next((view for role, view in views.items() if role == engine.role), None)) is not None:
        yield HostItem(f"{engine.role} ranks", RANK_BYTES)
        if view.model is not None:
            yield from _rank_items(config, device, engine, view, view.model)
        return
    weights = 0
    if device == "cpu" and actor is not None and engine.role == "rollout":
        item = ITEMS[config.actor.dtype]
        weights = server_weights(actor, engine.sizes) * item
        cache = backend_of(config).cached_tokens_on_cpu(config) * kv_token_bytes(actor, engine.sizes, item)
        weights += min(cache, int(MOST_CACHE * total))
    yield HostItem(f"{engine.role} servers", SERVER_BYTES + weights)


def _rank_items(
    config: RunConfig, device: Device, engine: EnginePlan, view: RoleView, model: ModelSpec
) -> Iterator[HostItem]:
    """Yield a rank's tensors on the host: all on a CPU; on a GPU offloaded ones, and the copy of a checkpoint."""
    memory = of_trainer(MemorySettings(offload=config.rollout.alternates), view.engine)
    memory = replace(memory, trained=trained_share(config, model))
    work = Workload(model, megatron_settings(view.engine), memory, view.batch)
    resting = footprint(engine, without_offload(work))
    if device == "cpu":
        tensors = sum(item.bytes for item in resting.peak.items if item.name not in (CUDA, NCCL))
        yield HostItem(f"{engine.role} tensors", tensors)
        return
    limit = None if (most := config.recover.host_copy_gb) is None else int(most * 1e9)
    yield from state_items(engine.role, resting, work, saves=config.recover.mode != "off", copy_bytes=limit)


def _fix(config: RunConfig, device: Device, plan: Plan, models: Models, total: int) -> str:
    """Return the smallest changes of keys with which the run fits on an idle machine, or another remedy."""
    requests = backend_of(config).cached_tokens_on_cpu(config) // config.context_length
    tokens = config.actor.mb_spec.max_tokens_per_mb
    changes = (
        [("sglang.max_running_requests", n) for n in _halves(requests, 8)],
        [("actor.mb_spec.max_tokens_per_mb", n) for n in _halves(tokens, config.longest_sequence)],
    )
    alone = [[change] for each in changes for change in each]
    tried = [*alone, *([first, second] for first in changes[0] for second in changes[1])]
    if device == "cuda":
        waits = config.recover.mode != "off" and config.recover.host_copy_gb is None
        tried = [[("recover.host_copy_gb", 0)]] if waits else []
    for settings in tried:
        smaller = config
        for key, value in settings:
            smaller = _change_key(smaller, key.split("."), value)
        if sum(item.bytes for item in host_items(smaller, device, plan, models, total)) <= SPARE * total:
            help = "write " + " ".join(f"{key}={value}" for key, value in settings)
            return f"{help}, with which training waits for each checkpoint" if device == "cuda" else help
    return "use fewer ranks and servers on a node, a smaller model, or a machine with more memory"


def _change_key[T: BaseModel](section: T, names: list[str], value: int) -> T:
    """Return a section with another value of one key."""
    name, *rest = names
    return section.model_copy(update={name: _change_key(getattr(section, name), rest, value) if rest else value})


def _halves(value: int, least: int) -> list[int]:
    """Return half of a value, a quarter and so on, down to a least value."""
    found = []
    while (value := value // 2) >= least:
        found.append(value)
    return found


def machine_bytes() -> tuple[int, int] | None:
    """Return total and available memory of this machine, within the limit of its control group; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = {line.partition(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith("kB")}
    total, available = sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemTotal"])
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # without a limit its file says `max`
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        total, available = min(total, limit), min(available, limit - used)
    return total, available
