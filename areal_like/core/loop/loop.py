"""The loop of asynchronous reinforcement learning.

Prompts are admitted while their samples can still be fresh when they are trained; servers generate all the time. A
training step takes the oldest finished groups, moves the policy from version v to v + 1, and sends the new weights to
every server before the next step.

Evaluation prompts are answered meanwhile with the published version; the next version waits for the last answer, so
that all answers come from one version.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from areal_like.core.checkpoint.journal import RunState
from areal_like.core.checkpoint.recovery import Recovery
from areal_like.core.config.schema import RunConfig
from areal_like.core.errors import RewardsMissing
from areal_like.core.gc_tuning import release
from areal_like.core.hooks import Hook, Share, TrainingStep
from areal_like.core.loop.evaluation import Evaluator
from areal_like.core.loop.logprob_check import check_logprobs
from areal_like.core.loop.policies import Policy, describe_batch, split
from areal_like.core.loop.prompt_results import PromptResults, describe_place
from areal_like.core.loop.step import Models, mean_of_shares, train_step
from areal_like.core.loop.stopping import Stop, unless_stopped
from areal_like.core.rollout.collector import AnyCollector
from areal_like.core.weights import WeightSync, publish
from areal_like.metrics.record import Record


class Sharing(Protocol):
    """Switches the GPUs between servers and trainer, as the loop asks."""

    async def to_servers(self) -> None:
        """Let the servers generate."""

    async def to_trainer(self, evaluating: asyncio.Task[None] | None) -> None:
        """Make room for the trainer; a running evaluation receives its answers first."""


class Resident:
    """Both stay on their GPUs: `rollout.sharing: resident`, and layouts without shared GPUs."""

    async def to_servers(self) -> None: ...

    async def to_trainer(self, evaluating: asyncio.Task[None] | None) -> None: ...


RESIDENT = Resident()


@dataclass(frozen=True)
class Parts:
    """The parts of a run, ready to be used; `policies` are its adapters by name, or its only policy under ""."""

    policies: Mapping[str, Policy]
    sync: WeightSync
    collector: AnyCollector
    evaluator: Evaluator
    models: Models = field(default_factory=Models)
    statistics: Sequence[Callable[[], Mapping[str, float]]] = ()  # since the last call, of the parts' helpers
    hooks: Sequence[Hook] = ()  # of capabilities
    load: Callable[[], Mapping[str, float]] = dict  # of the servers, now
    recovery: Recovery | None = None
    stop: Stop = field(default_factory=lambda: Stop(None, lambda text: None))
    sharing: Sharing = RESIDENT
    results: PromptResults | None = None


async def reinforce(
    config: RunConfig, parts: Parts, steps: int, record: Record, resumed: RunState | None = None
) -> None:
    """Train up to version `steps`, from version 0 or a resumed run's version, which the servers already hold.

    A batch without any reward skips the optimizer: its version is published with unchanged weights, so that admitted
    samples stay within the staleness bound. Raises RewardsMissing after more than `reward.max_missing_batches` such
    batches in a row, and LogprobMismatch before the first step.
    """
    for hook in parts.hooks:
        await hook.start()
    async with asyncio.TaskGroup() as tasks:

        async def keep(state: RunState, *, now: bool) -> None:
            if parts.recovery:
                await parts.recovery.keep(state, tasks, now=now, evaluating=evaluating, record=record.state)

        record.start()
        state = start = resumed or RunState()
        parts.collector.publish(state.version)
        evaluating = None if resumed else _start_evaluation(parts, tasks, 0, steps, record)
        if config.warm_start and not resumed:
            await keep(state, now=True)
        for version in range(state.version, steps):
            step = await _next_step(parts, version, record, evaluating)
            if step is None:  # the run is asked to stop
                if state is not start:  # which has its checkpoint
                    await keep(state, now=True)
                await parts.stop.leave()
                return
            if state is start:
                await _check_logprobs(parts, step, record)
            stats = await _train(parts, step, record)
            state = _note_place(config, parts, step, missing=0 if stats else state.missing_in_row + 1)
            await _publish(config, parts, step, record, evaluating)
            evaluating = _start_evaluation(parts, tasks, step.done, steps, record)
            await _follow(parts, step, record)
            await _save(config, parts, record, step.done, last=step.done == steps)
            tasks.create_task(record.samples(step.done, step.trajectories))
            await _report(config, parts, step, stats, record, evaluating)
            if parts.recovery and step.line:
                await parts.recovery.note(step.line)
                with record.phase("checkpoint"):
                    await keep(state, now=step.done == steps)
            del step  # with its arrays, before the next one is waited for
        if evaluating:
            await parts.sharing.to_servers()


async def _next_step(
    parts: Parts, version: int, record: Record, evaluating: asyncio.Task[None] | None
) -> TrainingStep | None:
    """Return the next batch of trajectories; it ends the servers' time slice and starts the trainer's.

    Returns None if the run is asked to stop before. A time-shared trainer waits for the batch in any case, because it
    cannot save in the servers' time slice.
    """
    await parts.sharing.to_servers()
    with record.phase("wait for rollouts"):
        async with _run_beside([hook.while_waiting(version + 1, lambda: _present(parts)) for hook in parts.hooks]):
            if parts.recovery and parts.sharing is RESIDENT:
                trajectories = await unless_stopped(parts.stop, asyncio.create_task(parts.collector.next_batch()))
            else:
                trajectories = await parts.collector.next_batch()
    step = None
    if trajectories is not None and not parts.stop.asked.is_set():
        shares = {name: Share(own) for name, own in split(trajectories, parts.policies).items()}
        step = TrainingStep(version, trajectories, shares)
        for hook in parts.hooks:
            await hook.before_step(step)
    await parts.sharing.to_trainer(evaluating)
    return step


@asynccontextmanager
async def _run_beside(coroutines: Iterable[Coroutine[None, None, None]]) -> AsyncIterator[None]:
    """Run coroutines until the body ends; raise the exception of one that failed."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()


async def _check_logprobs(parts: Parts, step: TrainingStep, record: Record) -> None:
    """Compare servers and trainer before the first step, for each policy."""
    with record.phase("log-probs"):
        for name, share in step.shares.items():
            if share.trajectories:
                await check_logprobs(parts.policies[name].config, parts.policies[name].trainer, share.trajectories)


def _present(parts: Parts) -> dict[str, float]:
    """Return the metrics that name the cause of a wait for rollouts, so far; see `Hook.while_waiting`."""
    return {
        "rollout/dropped_groups": float(parts.collector.dropped),
        "rollout/oldest_group_seconds": parts.collector.oldest_s,
        "reward/queue_seconds_mean": max(each.rewards.queue_seconds_mean() for each in parts.policies.values()),
        **parts.load(),
    }


async def _train(parts: Parts, step: TrainingStep, record: Record) -> dict[str, float]:
    """Train each policy on its own trajectories; return the statistics, {} if nothing was trained."""
    for hook in parts.hooks:
        await hook.before_training(step)
    for name, share in step.shares.items():
        policy = parts.policies[name]
        share.stats = await train_step(policy, parts.models, share, step.version, record)
        if name:
            policy.note_missing(len(share.trajectories), missing=not share.stats, step=step.done)
    for hook in parts.hooks:
        await hook.after_training(step)
    return mean_of_shares(step.shares)


def _note_place(config: RunConfig, parts: Parts, step: TrainingStep, *, missing: int) -> RunState:
    """Return the state after the step, before groups of the new version start, and note the journal's line.

    Raises RewardsMissing if `missing` batches in a row had no reward, and these are too many.
    """
    if missing > config.reward.max_missing_batches:
        has_teacher = config.teacher is not None
        raise RewardsMissing(len(step.trajectories), f"step {step.done}", has_teacher=has_teacher)
    if parts.recovery is None and parts.results is None:
        return RunState(step.done, missing_in_row=missing)
    step.line, state = describe_place(parts.collector, parts.results, step.trajectories, step.done, missing)
    return state


async def _publish(
    config: RunConfig, parts: Parts, step: TrainingStep, record: Record, evaluating: asyncio.Task[None] | None
) -> None:
    """Send the new weights to the servers after a running evaluation has its answers."""
    if evaluating:
        with record.phase("evaluation"):
            await evaluating
    with record.phase("weight update"):
        await publish(parts.sync, step.done, config.weight_update.timeout_s)
    parts.collector.publish(step.done)


async def _follow(parts: Parts, step: TrainingStep, record: Record) -> None:
    """Update the policy's followers: the reference if it is due, and the models of capabilities."""
    reference = parts.models.reference
    if reference and reference.due(step.done):
        with record.phase("reference update"):
            await reference.update()
    for hook in parts.hooks:
        await hook.after_publish(step)


async def _save(config: RunConfig, parts: Parts, record: Record, done: int, *, last: bool) -> None:
    """Save the policy, or its adapters and the merged model, and the critic, each in its directory, if that is due."""
    every = config.saver.freq_steps
    if not (last or (every and done % every == 0)):
        return
    path = record.checkpoint(done)
    with record.phase("saving"):
        for name, policy in parts.policies.items():
            if config.actor.use_lora:
                await policy.trainer.save_adapters(path / name)
            if not config.actor.use_lora:
                await policy.trainer.save_hf(path)
            elif config.saver.merge_lora:
                await policy.trainer.save_hf(path.with_name(f"{path.name}-merged") / name)
        if parts.models.critic:
            await parts.models.critic.save_hf(path.with_name(f"{path.name}-critic"))


async def _report(
    config: RunConfig,
    parts: Parts,
    step: TrainingStep,
    stats: dict[str, float],
    record: Record,
    evaluating: asyncio.Task[None] | None,
) -> None:
    """Record the statistics of the trainer (`stats`), the batch, hooks and parts, and free the trajectories."""
    policies = parts.policies.values()
    stats |= step.measured | await asyncio.to_thread(describe_batch, step.trajectories, parts.policies, step.version)
    if any(policy.algorithm.keeps for policy in policies) or config.rollout.oversampling:
        stats["dropped_groups"] = float(parts.collector.newly_dropped())
    own = [policy.statistics for policy in policies]
    for count in (*parts.statistics, *(hook.statistics for hook in parts.hooks), *own):
        stats |= count()
    stats["rollout/oldest_group_seconds"] = parts.collector.oldest_s
    generated = int(stats.get("tokens/generated", 0))  # of running samples too, unlike the collector's count
    derive = [partial(hook.derive_metrics, step.done) for hook in parts.hooks]
    record.step(step.done, stats, generated, evaluating=evaluating is not None, derive=derive)
    for trajectories in (step.trajectories, *(share.trajectories for share in step.shares.values())):
        await release(trajectories)


def _start_evaluation(
    parts: Parts, tasks: asyncio.TaskGroup, done: int, steps: int, record: Record
) -> asyncio.Task[None] | None:
    """Start the evaluation of a version if one is due."""
    due = parts.evaluator.due(done, steps)
    return tasks.create_task(_evaluate(parts.evaluator, done, record)) if due else None


async def _evaluate(evaluator: Evaluator, done: int, record: Record) -> None:
    results = await evaluator.evaluate()
    record.held_out(done, {name: result.scalars() for name, result in results.items()})
    for name, result in results.items():
        await record.samples(done, result.trajectories, name)
