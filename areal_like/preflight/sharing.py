"""Trainer and servers on the same GPUs: whether they may be time-shared, and whether weights may go over the device."""

import importlib.util
from collections.abc import Iterator

from allocation.diagnostics import Finding
from allocation.hardware import GIB
from allocation.memory import footprint, shared_peak
from allocation.plan import Plan
from areal_like.core.config.findings import finding, missing_package
from areal_like.core.config.schema import RunConfig
from areal_like.core.types import Device
from areal_like.preflight.layout import workloads
from areal_like.preflight.machine import gpu_count
from areal_like.preflight.view import Models

_KEY = "rollout.sharing"


def check_sharing(config: RunConfig, device: Device, plan: Plan | None) -> Iterator[Finding]:
    """Check the requirements of `rollout.sharing` and `weight_update.mode` on shared GPUs."""
    if plan is None:
        return
    if config.weight_update.mode == "ipc":
        yield from _exporting_ranks(plan)
    saves = importlib.util.find_spec("torch_memory_saver") is not None
    if config.rollout.alternates and device == "cuda" and gpu_count() and not saves:
        yield missing_package(_KEY, "torch-memory-saver")


def _exporting_ranks(plan: Plan) -> Iterator[Finding]:
    """Check that an actor rank is on every GPU of every server, since IPC handles work on one device only."""
    trainer = set(plan.engine("actor").devices)
    alone = [(server, set(it.devices) - trainer) for server, it in enumerate(plan.engine("rollout").servers)]
    if alone := [(server, devices) for server, devices in alone if devices]:
        server, devices = alone[0]
        gpus = len(plan.engine("rollout").servers[server].devices)
        message = f"weight_update.mode=ipc needs an actor rank on every server GPU; server {server} lacks one on "
        message += f"{len(devices)} of its {gpus} GPUs" if gpus > 1 else "its GPU"
        help = (
            "write weight_update.mode=collective, or use a layout in which servers and actor share all GPUs, such as "
        )
        yield finding("RUN-SHARING-IPC", "weight_update.mode", message, f"{help}sglang:d2|megatron:d2")


def describe_sharing(config: RunConfig, plan: Plan, models: Models, image_share: float = 0.0) -> str | None:
    """Return how trainer and servers share GPUs, and the memory that this needs; None if they do not."""
    actor, rollout = plan.engine("actor"), plan.engine("rollout")
    if not set(actor.devices) & set(rollout.devices):
        return None
    how = "time-shared" if config.rollout.alternates else "colocated"
    said = f"trainer and servers are {how} on the same GPUs ({_KEY}={config.rollout.sharing})"
    works = workloads(config, models, image_share)
    room = works["actor"].memory.gpu_bytes if works else None
    if room is None:
        return said
    gpus = set(rollout.devices)
    engines = [engine for engine in plan.engines if gpus & set(engine.devices) and engine.role in works]
    prints = [footprint(engine, works[engine.role]) for engine in engines]
    together, apart = (shared_peak(prints, offload=turns) / GIB for turns in (False, True))
    return f"{said}: of {room / GIB:.0f} GiB they need about {together:.0f} colocated, {apart:.0f} time-shared"
