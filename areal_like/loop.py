"""One run of asynchronous reinforcement learning.

Prompts are admitted while their samples may still be fresh when they are used; servers generate all the while. A
training step takes the oldest finished groups, moves the policy from version v to v + 1, and brings the new weights to
every server before the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areal_like.algorithms.batch import minibatches, policy_batch, with_fields
from areal_like.config.schema import ActorConfig, RunConfig
from areal_like.errors import RewardsMissing
from areal_like.evaluation import evaluate, evaluation_due
from areal_like.metrics.record import Record
from areal_like.rollout.collector import Collector
from areal_like.rollout.pool import ServerPool
from areal_like.trainer.remote import Trainer
from areal_like.types import Batch, FinishReason, LossSpec, Prompt, Trajectory
from areal_like.weights.sync import WeightSync, publish
from areal_like.workflows.protocol import Score


@dataclass(frozen=True)
class Parts:
    """What a run is made of, ready to be used."""

    trainer: Trainer
    pool: ServerPool
    sync: WeightSync
    collector: Collector
    score: Score
    held_out: Sequence[Prompt]
    stop_token_ids: tuple[int, ...]


async def reinforce(config: RunConfig, parts: Parts, steps: int, record: Record) -> None:
    """Train for `steps` versions; the servers hold version 0 before and version `steps` after it."""
    if evaluation_due(config.evaluator, 0, steps) and parts.held_out:
        reward, _ = await evaluate(config, parts)
        record.held_out(0, reward)
    record.start()
    parts.collector.publish(0)
    for version in range(steps):
        with record.phase("wait for rollouts"):
            trajectories = await parts.collector.next_batch()
        stats = await train_step(config.actor, config.gconfig.temperature, parts.trainer, trajectories, version, record)
        with record.phase("weight update"):
            await publish(parts.sync, version + 1, config.weight_update.timeout_s)
        parts.collector.publish(version + 1)
        done = version + 1
        if evaluation_due(config.evaluator, done, steps) and parts.held_out:
            with record.phase("evaluation"):
                reward, logprob_diff = await evaluate(config, parts)
            record.held_out(done, reward)
            stats |= logprob_diff
        if done == steps or (config.saver.freq_steps and done % config.saver.freq_steps == 0):
            with record.phase("saving"):
                await parts.trainer.save_hf(record.checkpoint(done))
        record.step(done, stats | describe(trajectories, version), parts.collector.tokens_generated)


async def train_step(
    actor: ActorConfig,
    temperature: float,
    trainer: Trainer,
    trajectories: Sequence[Trajectory],
    version: int,
    record: Record,
) -> dict[str, float]:
    """Move the policy from `version` to the next: one optimizer step per mini-batch; returns their mean statistics."""
    batch = policy_batch(trajectories, version)
    if not len(batch.lengths):
        raise RewardsMissing(len(trajectories), f"step {version + 1}")
    # At the first mini-batch the proximal policy is the current one, which the loss knows without another forward pass.
    parts: list[Batch] = minibatches(batch, actor.ppo_n_minibatches)
    if len(parts) > 1:
        with record.phase("log-probs"):
            for i in range(1, len(parts)):
                parts[i] = with_fields(parts[i], proximal_logprobs=await trainer.log_probs(parts[i], temperature))
    loss = LossSpec(
        "policy",
        {
            "eps_clip": actor.eps_clip,
            "eps_clip_higher": actor.eps_clip if actor.eps_clip_higher is None else actor.eps_clip_higher,
            "behave_imp_weight_cap": actor.behave_imp_weight_cap,
        },
    )
    with record.phase("training"):
        stats = [await trainer.train(part, loss, temperature) for part in parts]
    mean = {name: float(np.mean([part[name] for part in stats])) for name in stats[0]}
    # The servers' log-probs are compared where both sides used the same weights; a batch may have no such token.
    tokens = [part["loss_tokens"] for part in stats]
    share, diff = (
        float(np.average([part[name] for part in stats], weights=tokens))
        for name in ("on_policy_share", "on_policy_logprob_diff")
    )
    del mean["on_policy_logprob_diff"]
    return (
        mean
        | {"on_policy_share": share, "tokens": float(len(batch.tokens))}
        | ({"logprob_diff": diff / share} if share else {})
    )


def describe(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """What a batch of trajectories looks like when it is trained at `version`."""
    rewards = [item.reward for item in trajectories if item.reward is not None]
    lengths = [(item.versions >= 0).sum() for item in trajectories]
    staleness = [version - item.oldest_version for item in trajectories]
    return {
        "reward": float(np.mean(rewards)),
        "reward_missing": float(len(trajectories) - len(rewards)),
        "response_length": float(np.mean(lengths)),
        "truncated_share": float(np.mean([item.finish_reason is FinishReason.LENGTH for item in trajectories])),
        "staleness_mean": float(np.mean(staleness)),
        "staleness_max": float(np.max(staleness)),
    }
