"""The loop of asynchronous reinforcement learning.

Prompts are admitted while their samples can still be fresh when they are trained; servers generate all the time. A
training step takes the oldest finished groups, moves the policy from version v to v + 1, and sends the new weights to
every server before the next step.

Evaluation prompts are answered meanwhile with the published version; the next version waits for the last answer, so
that all answers come from one version.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from areal_like.algorithms.batch import join, minibatches, policy_batches, with_field
from areal_like.algorithms.types import Algorithm, Need
from areal_like.checkpoint.recovery import Recovery
from areal_like.checkpoint.state import RunState
from areal_like.config.schema import RunConfig
from areal_like.errors import RewardsMissing, RunError
from areal_like.metrics.record import Record
from areal_like.rewards.scoring import Rewards
from areal_like.run.drift import DriftAlarm
from areal_like.run.evaluation import Evaluator
from areal_like.run.gpu_sharing import RESIDENT, Sharing
from areal_like.run.logprob_check import check_logprobs
from areal_like.run.policies import AnyCollector, Policy, describe_batch, split
from areal_like.run.prompt_results import PromptResults, describe_place
from areal_like.run.stopping import Stop, unless_stopped
from areal_like.runtime.gc_tuning import release
from areal_like.trainer.reference import Reference
from areal_like.trainer.remote import Trainer
from areal_like.types import Batch, Floats, Trajectory
from areal_like.weights.sync import WeightSync, publish


@dataclass(frozen=True)
class Parts:
    """The parts of a run, ready to be used."""

    algorithm: Algorithm
    trainer: Trainer
    sync: WeightSync
    collector: AnyCollector
    evaluator: Evaluator
    rewards: Rewards
    reference: Reference | None = None
    update_teacher: Callable[[int], Awaitable[None]] | None = None  # after a training step
    critic: Trainer | None = None
    episodes: Callable[[], Mapping[str, float]] = dict  # episodes of a workflow by outcome, since the last call
    tokens: Callable[[], Mapping[str, float]] = dict  # the token ledger
    teacher: Callable[[], Mapping[str, float]] = dict  # responses that the teacher could not score, since the last call
    servers: Callable[[], Mapping[str, float]] = dict  # server statistics since the last call
    load: Callable[[], Mapping[str, float]] = dict  # of the servers, now
    recovery: Recovery | None = None
    stop: Stop = field(default_factory=lambda: Stop(None, lambda text: None))
    sharing: Sharing = RESIDENT
    drift: DriftAlarm | None = None
    results: PromptResults | None = None
    policies: Mapping[str, Policy] = field(default_factory=dict)  # several adapters, which share the other parts
    alarms: Mapping[str, DriftAlarm] = field(default_factory=dict)  # drift alarms of several adapters


async def reinforce(
    config: RunConfig, parts: Parts, steps: int, record: Record, resumed: RunState | None = None
) -> None:
    """Train up to version `steps`, from version 0 or that of a resumed run, which the servers already hold.

    A batch without any reward skips the optimizer: its version is published with unchanged weights, so that admitted
    samples stay within the staleness bound. Raises RewardsMissing after more than `reward.max_missing_batches` such
    batches in a row, and LogprobMismatch before the first step.
    """
    async with asyncio.TaskGroup() as tasks:

        def evaluation(done: int) -> asyncio.Task[None] | None:
            due = parts.evaluator.due(done, steps)
            return tasks.create_task(_evaluate(parts.evaluator, done, record)) if due else None

        record.start()
        state = resumed or RunState()
        parts.collector.publish(state.version)
        evaluating, in_row = None if resumed else evaluation(0), state.missing_in_row
        if parts.recovery and config.warm_start and not resumed:
            await parts.recovery.keep(state, tasks, now=True, evaluating=evaluating, record=record.state)
        reached: RunState | None = None  # by this attempt; a resumed state has its checkpoint
        for version in range(state.version, steps):
            done = version + 1
            trajectories = await _next_batch(parts, record, evaluating)
            if trajectories is None:
                if parts.recovery and reached:
                    await parts.recovery.keep(reached, tasks, now=True, evaluating=evaluating, record=record.state)
                await parts.stop.leave()
                return
            if version == state.version and trajectories:
                with record.phase("log-probs"):
                    await _check_logprobs(config, parts, trajectories)
            stats, probed = await _train_and_compare(config, parts, trajectories, version, record)
            in_row = 0 if stats else in_row + 1
            if in_row > config.reward.max_missing_batches:
                raise RewardsMissing(len(trajectories), f"step {done}", has_teacher=config.teacher is not None)
            place = None
            if parts.recovery or parts.results:
                place = describe_place(parts.collector, parts.results, trajectories, done, in_row)
            await _publish(config, parts, record, done, evaluating)
            evaluating = evaluation(done)
            await _update_companions(parts, record, done)
            if done == steps or (config.saver.freq_steps and done % config.saver.freq_steps == 0):
                await _save(config, parts, record, done)
            tasks.create_task(record.samples(done, trajectories))
            stats |= probed | await _statistics(config, parts, trajectories, version)
            record.step(done, stats, parts.collector.tokens_generated, evaluating=evaluating is not None)
            await release(trajectories)
            if parts.recovery and place:
                step, reached = place
                await parts.recovery.note(step)
                with record.phase("checkpoint"):
                    now = done == steps
                    await parts.recovery.keep(reached, tasks, now=now, evaluating=evaluating, record=record.state)
        if evaluating:
            await parts.sharing.to_servers()


async def _next_batch(parts: Parts, record: Record, evaluating: asyncio.Task[None] | None) -> list[Trajectory] | None:
    """Return the next batch of trajectories; it ends the servers' time slice and starts the trainer's.

    Returns None if the run is asked to stop before. A time-shared trainer waits for the batch in any case, because it
    cannot save in the servers' time slice.
    """
    await parts.sharing.to_servers()
    with record.waiting(lambda: _present(parts)):
        if parts.recovery and parts.sharing is RESIDENT:
            trajectories = await unless_stopped(parts.stop, asyncio.create_task(parts.collector.next_batch()))
        else:
            trajectories = await parts.collector.next_batch()
    if trajectories is None or parts.stop.asked.is_set():
        await parts.sharing.to_trainer(evaluating)
        return None
    shares = split(trajectories, parts.policies).items()
    alarms = [(parts.alarms.get(name), own) for name, own in shares] or [(parts.drift, trajectories)]
    if probed := [(alarm, own) for alarm, own in alarms if alarm]:
        with record.phase("drift probe"):
            await asyncio.gather(*(alarm.score(own) for alarm, own in probed))
    await parts.sharing.to_trainer(evaluating)
    return trajectories


def _present(parts: Parts) -> dict[str, float]:
    """Return the metrics that name the cause of a wait for rollouts, so far; see WaitingNotes."""
    judged = [policy.rewards for policy in parts.policies.values()] or [parts.rewards]
    return {
        "rollout/dropped_groups": float(parts.collector.dropped),
        "reward/queue_seconds_mean": max(rewards.queue_seconds_mean() for rewards in judged),
        **parts.load(),
    }


async def _train_and_compare(
    config: RunConfig, parts: Parts, trajectories: Sequence[Trajectory], version: int, record: Record
) -> tuple[dict[str, float], dict[str, float]]:
    """Train one step. Return its statistics, and the distance of servers and trainer on the drift alarm's probe."""
    if parts.policies:
        return await _train_adapters(parts, trajectories, version, record)
    if parts.drift is None:
        return await train_step(config, parts, trajectories, version, record), {}
    with record.phase("drift probe"):
        probed = await parts.drift.compare(version)
    stats = await train_step(config, parts, trajectories, version, record)
    await parts.drift.observe(version, stats.get("logprob_diff"))
    return stats, probed


async def _train_adapters(
    parts: Parts, trajectories: Sequence[Trajectory], version: int, record: Record
) -> tuple[dict[str, float], dict[str, float]]:
    """Train each adapter on its own trajectories; return means of their statistics, and each one's by `NAME/`.

    Of the distances on probes it returns the largest, and each adapter's.
    """
    found: dict[str, dict[str, float]] = {}
    probed: dict[str, float] = {}
    for name, own in split(trajectories, parts.policies).items():
        policy = parts.policies[name]
        alarm = parts.alarms.get(name)
        alone = replace(parts, algorithm=policy.algorithm, trainer=policy.trainer, drift=alarm, policies={})
        stats, apart = await _train_and_compare(policy.config, alone, own, version, record)
        found |= {name: stats} if stats else {}
        for tag, distance in apart.items():
            probed |= {tag: max(distance, probed.get(tag, 0.0)), f"{name}/{tag}": distance}
        policy.note_missing(len(own), missing=not stats, step=version + 1)
    if not found:
        return {}, probed
    tokens = {"tokens": sum(stats["tokens"] for stats in found.values())}
    each = {f"{name}/{tag}": value for name, stats in found.items() for tag, value in stats.items()}
    return mean(list(found.values())) | tokens | each, probed


async def _check_logprobs(config: RunConfig, parts: Parts, trajectories: Sequence[Trajectory]) -> None:
    """Compare servers and trainer before the first step, for each adapter if there are several."""
    if not parts.policies:
        await check_logprobs(config, parts.trainer, trajectories)
    for name, own in split(trajectories, parts.policies).items():
        if own:
            await check_logprobs(config, parts.policies[name].trainer, own)


async def _update_companions(parts: Parts, record: Record, done: int) -> None:
    """Update the reference model and the teacher where they follow the policy and are due."""
    if parts.reference and parts.reference.due(done):
        with record.phase("reference update"):
            await parts.reference.update()
    if parts.update_teacher:
        with record.phase("teacher update"):
            await parts.update_teacher(done)


async def _publish(
    config: RunConfig, parts: Parts, record: Record, done: int, evaluating: asyncio.Task[None] | None
) -> None:
    """Send the new weights to the servers after a running evaluation has its answers."""
    if evaluating:
        with record.phase("evaluation"):
            await evaluating
    with record.phase("weight update"):
        await publish(parts.sync, done, config.weight_update.timeout_s)
    parts.collector.publish(done)


async def _save(config: RunConfig, parts: Parts, record: Record, done: int) -> None:
    """Save the policy, or its adapters and the merged model, and the critic, each in its directory."""
    path = record.checkpoint(done)
    several = {name: policy.trainer for name, policy in parts.policies.items()}
    with record.phase("saving"):
        for name, trainer in (several or {"": parts.trainer}).items():
            if config.actor.use_lora:
                await trainer.save_adapters(path / name)
            if not config.actor.use_lora:
                await trainer.save_hf(path)
            elif config.saver.merge_lora:
                await trainer.save_hf(path.with_name(f"{path.name}-merged") / name)
        if parts.critic:
            await parts.critic.save_hf(path.with_name(f"{path.name}-critic"))


async def _statistics(
    config: RunConfig, parts: Parts, trajectories: Sequence[Trajectory], version: int
) -> dict[str, float]:
    """Return the statistics of a step beside those of the trainer."""
    described = await asyncio.to_thread(describe_batch, trajectories, parts.policies, version)
    if any(each.keeps for each in _algorithms(parts)) or config.rollout.oversampling:
        described["dropped_groups"] = float(parts.collector.newly_dropped())
    own = {} if parts.policies else parts.rewards.statistics()
    results = parts.results.statistics() if parts.results else {}
    counts = (parts.episodes(), parts.tokens(), parts.teacher(), parts.servers(), results, own)
    return described | {name: value for part in counts for name, value in part.items()}


def _algorithms(parts: Parts) -> Sequence[Algorithm]:
    return [policy.algorithm for policy in parts.policies.values()] or [parts.algorithm]


async def _evaluate(evaluator: Evaluator, done: int, record: Record) -> None:
    results = await evaluator.evaluate()
    record.held_out(done, {name: result.scalars() for name, result in results.items()})
    for name, result in results.items():
        await record.samples(done, result.trajectories, name)


async def train_step(
    config: RunConfig, parts: Parts, trajectories: Sequence[Trajectory], version: int, record: Record
) -> dict[str, float]:
    """Move the policy from `version` to the next: one optimizer step per mini-batch, also of a critic.

    Returns their statistics, or {} if no trajectory has a reward. During its warm-up only the critic is trained.
    """
    algorithm, temperature, actor = parts.algorithm, config.gconfig.temperature, config.actor
    with record.phase("batch"):
        experience = await asyncio.to_thread(join, trajectories, version)
    if experience is None:
        return {}
    if "baselines" in algorithm.needs:
        if parts.results is None:
            raise RunError("The algorithm needs baselines, but the run keeps no values of prompts.")
        experience = replace(experience, baselines=parts.results.baselines(experience.groups))
    for need, name, phase in _PASSES:
        if need in algorithm.needs:
            with record.phase(phase):
                values = await _pass(parts, need, experience.batch, temperature)
            experience = with_field(experience, name, values)
    with record.phase("batch"):
        n = minibatches(experience.batch, actor.ppo_n_minibatches, actor.turns_per_minibatch)
        batches = await asyncio.to_thread(policy_batches, algorithm, experience, n)
    stats = {"tokens": float(sum(len(batch.tokens) for batch in batches))} | ({} if batches else {"unselected": 1.0})
    if parts.critic and algorithm.critic:
        with record.phase("training the critic"):
            of_critic = [await parts.critic.train(batch, algorithm.critic, temperature) for batch in batches]
        stats |= {f"critic_{name}": value for name, value in mean(of_critic).items()}
        if config.critic and version < config.critic.warmup_steps:
            return stats
    if "proximal" in algorithm.needs and len(batches) * actor.ppo_epochs > 1:
        # At the first optimizer step the proximal policy is the current one, which the loss knows without another pass.
        later = 0 if actor.ppo_epochs > 1 else 1
        with record.phase("log-probs"):
            batches[later:] = [await _with_proximal(parts.trainer, batch, temperature) for batch in batches[later:]]
    with record.phase("training"):
        at = algorithm.temperature or temperature
        of_policy = [
            await parts.trainer.train(batch, algorithm.loss, at) for _ in range(actor.ppo_epochs) for batch in batches
        ]
    if "proximal" not in algorithm.needs:  # later mini-batches know no log-probs of the weights that servers have
        of_policy[1:] = [{name: part[name] for name in part if name not in _ON_POLICY} for part in of_policy[1:]]
    return stats | mean(of_policy)


_ON_POLICY = ("on_policy_logprob_diff", "on_policy_share")
_OF_A_STEP = frozenset(
    {"loss", "grad_norm", "lr", "skipped", "loss_scale"}
)  # steps that leave responses out count as others
_PASSES: Sequence[tuple[Need, str, str]] = (  # before the targets: field and phase of each
    ("reference", "reference_logprobs", "reference"),
    ("values", "values", "values"),
    ("policy", "proximal_logprobs", "log-probs"),
)


async def _pass(parts: Parts, need: Need, batch: Batch, temperature: float) -> Floats:
    """Return values or log-probs that an algorithm needs from a model; preflight has checked that the run has it."""
    if need == "values" and parts.critic:
        return await parts.critic.values(batch)
    model = parts.reference if need == "reference" else parts.trainer
    if model is None or need == "values":
        raise RunError(f"The algorithm needs {need}, but the run has no model for it. Set ref={{}} or critic={{}}.")
    return await model.log_probs(batch, temperature)


async def _with_proximal(trainer: Trainer, batch: Batch, temperature: float) -> Batch:
    logprobs = await trainer.log_probs(batch, temperature)
    return replace(batch, fields={**batch.fields, "proximal_logprobs": logprobs})


def mean(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return means of the optimizer steps' statistics, weighted by tokens, or by steps for statistics of a whole step.

    `loss_tokens` are summed. Log-probs of servers and trainer are compared where both used the same weights; a step may
    have no such token.
    """
    result: dict[str, float] = {}
    for name in dict.fromkeys(name for part in stats for name in part):
        having = [part for part in stats if name in part]
        weights = [1 if name in _OF_A_STEP else part.get("loss_tokens", 1) for part in having]
        values = [part[name] for part in having]
        result[name] = float(sum(values) if name == "loss_tokens" else np.average(values, weights=weights))
    drift, share = result.pop(_ON_POLICY[0], 0.0), result.get(_ON_POLICY[1])
    return result | ({"logprob_diff": drift / share} if share else {})
