"""Advice on waiting times: a layout or η with which trainer and servers would wait less.

The working time of each engine in a step, on its own GPUs, is known. The model assumes that work spreads evenly over
other numbers of GPUs, which nearly holds for large batches. It ignores the cost of weight updates and the interference
of two engines on the same GPUs. A synchronous step waits for its slowest response; with η, η + 1 steps share one such
wait. The slowest response that ended in a step stands for it. More requests may have run beside this response than in a
synchronous step, so the advice rather overestimates the gain of asynchrony.
"""

import math
from dataclasses import dataclass

from areal_like.job import Job

WORTH = 0.85  # maximum share of a step's time that a recommended layout may need


@dataclass(frozen=True)
class GpuSplit:
    """GPUs of the servers and of the trainer, their allowed multiples, and η; nothing is colocated."""

    servers: int
    trainer: int
    server_unit: int
    trainer_unit: int
    staleness: int


def better(layout: GpuSplit, step_s: float, idle_servers: float, idle_trainer: float, slowest_s: float) -> str | None:
    """Return the setting that would make a step of `step_s` seconds clearly shorter, or None.

    `idle_servers` and `idle_trainer` are idle shares of the step, `slowest_s` the seconds of its slowest response.
    """
    seen = f"servers were idle for {idle_servers:.0%} of the time, the trainer for {idle_trainer:.0%}"
    by_servers, by_trainer = (1 - idle_servers) * step_s, (1 - idle_trainer) * step_s
    if max(by_servers, by_trainer) < WORTH * step_s:
        key, more = "rollout.max_head_offpolicyness", layout.staleness + 1
        return f"{seen}: they wait for each other, which {key}={more} loosens (now {layout.staleness})"
    total = layout.servers + layout.trainer
    work = by_servers * layout.servers, by_trainer * layout.trainer  # GPU seconds
    times = {
        count: max(work[0] / count, work[1] / (total - count))
        for count in range(layout.server_unit, total, layout.server_unit)
        if (total - count) % layout.trainer_unit == 0
    }
    count, seconds = min(times.items(), key=lambda item: item[1], default=(layout.servers, step_s))
    fits = total % layout.server_unit == 0 == total % layout.trainer_unit
    in_turns = max(work[0] / total, slowest_s) + work[1] / total if fits else math.inf
    at_once = max(sum(work) / total, slowest_s / (1 + layout.staleness)) if fits else math.inf
    together = f"both on all {total} GPUs (sglang:…|megatron:…)"
    if in_turns < min(seconds, WORTH * step_s) and in_turns <= at_once / WORTH:
        where = f"asynchrony does not pay here; {together} with rollout.max_head_offpolicyness=0"
        return f"{seen}: {where} would take about {in_turns:.3g} s a step, not {step_s:.3g}"
    if at_once < WORTH * min(seconds, step_s):
        return f"{seen}: {together} would take about {at_once:.3g} s a step, not {step_s:.3g}, if memory allows"
    if seconds < WORTH * step_s:
        where = f"servers on {count} GPUs and the trainer on {total - count}"
        return f"{seen}: {where} would take about {seconds:.3g} s a step, not {step_s:.3g}"
    return None


def split_of(job: Job) -> GpuSplit | None:
    """Return the GPUs of a run whose trainer and servers have separate ones that stay the same, otherwise None."""
    actor, rollout = job.plan.engine("actor"), job.plan.engine("rollout")
    if job.device == "cpu" or set(actor.devices) & set(rollout.devices):
        return None
    together = [engine for engine in job.plan.engines if set(engine.devices) & set(actor.devices)]
    return GpuSplit(
        servers=len(rollout.devices),
        trainer=len(actor.devices),
        server_unit=len(rollout.devices) // rollout.sizes.dp,
        trainer_unit=math.lcm(*(engine.sizes.smallest_world for engine in together)),
        staleness=job.config.rollout.max_head_offpolicyness,
    )
