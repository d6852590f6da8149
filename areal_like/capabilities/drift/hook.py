"""The alarms of a run, one for each adapter, as the loop calls them."""

import asyncio
from collections.abc import Mapping

from areal_like.capabilities.drift.alarm import DriftAlarm
from areal_like.capabilities.drift.schema import DriftKeys
from areal_like.capability import Started
from areal_like.config.keys import with_keys
from areal_like.hooks import Hook, TrainingStep
from areal_like.metrics.record import Record


class DriftHook(Hook):
    """Compares servers and trainer on a probe of a step's responses, before its weights change."""

    def __init__(self, alarms: Mapping[str, DriftAlarm], record: Record) -> None:
        self._alarms, self._record = alarms, record

    async def before_step(self, step: TrainingStep) -> None:
        """Score the probes on the servers."""
        with self._record.phase("drift probe"):
            await asyncio.gather(*(alarm.score(step.shares[name].trajectories) for name, alarm in self._alarms.items()))

    async def before_training(self, step: TrainingStep) -> None:
        """Measure the largest distance, and each adapter's if there are several."""
        with self._record.phase("drift probe"):
            for name, alarm in self._alarms.items():
                for tag, distance in (await alarm.compare(step.version)).items():
                    step.measured[tag] = max(distance, step.measured.get(tag, 0.0))
                    step.measured |= {f"{name}/{tag}": distance} if name else {}

    async def after_training(self, step: TrainingStep) -> None:
        """Judge the log-probs that came with the responses."""
        for name, alarm in self._alarms.items():
            await alarm.observe(step.version, step.shares[name].stats.get("logprob_diff"))


def make_hook(run: Started) -> DriftHook | None:
    """Return the hook of the alarms, None without probes (`rollout.drift_probe_tokens`)."""
    spec = run.job.models.get("actor")
    alarms = {
        name: DriftAlarm(
            job.config,
            run.policies[name],
            run.pool,
            run.sync,
            run.say,
            has_experts=bool(spec and spec.experts),
            columns=job.served,
            adapter=job.adapter,
            alarms=len(run.jobs),
        )
        for name, job in run.jobs.items()
        if with_keys(job.config.rollout, DriftKeys).drift_probe_tokens
    }
    return DriftHook(alarms, run.record) if alarms else None
