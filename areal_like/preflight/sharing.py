"""Trainer and servers on the same GPUs: whether they may be time-shared, and whether weights may go over the device."""

import importlib.util
from collections.abc import Iterator, Mapping

from allocation.diagnostics import Finding, Severity
from allocation.hardware import GIB
from allocation.memory import footprint, shared_peak
from allocation.model_spec import ModelSpec
from allocation.plan import Plan
from areal_like.core.config.findings import finding, missing_package
from areal_like.core.config.schema import RunConfig, TrainerRole
from areal_like.core.types import Device
from areal_like.preflight.layout import workloads
from areal_like.preflight.machine import gpu_count

_KEY = "rollout.sharing"
_STAY = f"write {_KEY}=resident"


def check_sharing(config: RunConfig, device: Device, plan: Plan | None) -> Iterator[Finding]:
    """Check the requirements of `rollout.sharing` and `weight_update.mode` on shared GPUs."""
    if plan is None:
        return
    if config.weight_update.mode == "ipc":
        yield from _exporting_ranks(plan)
    if config.rollout.alternates:
        yield from _turns(config, device, plan)


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


def _turns(config: RunConfig, device: Device, plan: Plan) -> Iterator[Finding]:
    actor, rollout = plan.engine("actor"), plan.engine("rollout")
    if device == "cpu":
        yield finding("RUN-SHARING-CPU", _KEY, f"{_KEY}=alternate needs GPUs (device=cuda)", _STAY)
    elif gpu_count() and importlib.util.find_spec("torch_memory_saver") is None:
        yield missing_package(_KEY, "torch-memory-saver")
    if set(actor.devices) != set(rollout.devices):
        message = f"{actor.text} and {rollout.text} use different GPUs; {_KEY}=alternate needs the same GPUs for both"
        yield finding("RUN-SHARING-GPUS", _KEY, message, f"{_STAY}, or place both on all GPUs: sglang:…|megatron:…")
    if config.workflows:
        message = "the time limit of an episode includes the trainer's time slices"
        yield finding("RUN-SHARING-EPISODES", "episode.timeout_s", message, severity=Severity.WARNING)
    if config.weight_update.requests == "drain":
        message = "drain waits for running requests, and a time slice of the trainer starts while requests run"
        yield finding("RUN-SHARING-DRAIN", "weight_update.requests", message, nearest=["in_place", "recompute"])


def describe_sharing(
    config: RunConfig, plan: Plan, models: Mapping[TrainerRole, ModelSpec | None], image_share: float = 0.0
) -> str | None:
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
