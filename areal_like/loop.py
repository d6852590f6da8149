"""One run of asynchronous reinforcement learning.

Prompts are admitted while their samples may still be fresh when they are used; servers generate all the while. A
training step takes the oldest finished groups, moves the policy from version v to v + 1, and brings the new weights to
every server before the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areal_like.algorithms.batch import minibatches, policy_batch, supervised_batch, with_fields
from areal_like.config.schema import ActorConfig, EvaluatorConfig, RunConfig
from areal_like.metrics.record import Record
from areal_like.rollout.client import Response, Sampling, ServerPool
from areal_like.rollout.collector import Collector, Score
from areal_like.trainer.remote import Trainer
from areal_like.types import Batch, FinishReason, LossSpec, Prompt, Trajectory
from areal_like.weights.sync import WeightSync, publish

EVALUATION_REQUEST = 64  # prompts in one request


class RewardsMissing(RuntimeError):
    """Not a single response of a batch could be judged."""

    def __init__(self, responses: int, where: str) -> None:
        super().__init__(
            f"{where}: all {responses} rewards are missing, because their verification timed out or crashed; "
            "raise reward.timeout_s or reward.workers"
        )


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


async def evaluate(config: RunConfig, parts: Parts) -> tuple[float, dict[str, float]]:
    """Mean reward on the held-out problems with the weights of trainer and servers; missing rewards do not count.

    And `logprob_diff`, the mean difference between the two's log-probs of a part of the responses, if these were
    sampled.
    """
    sampling = Sampling(
        max_new_tokens=config.gconfig.max_new_tokens,
        temperature=config.evaluator.temperature,
        stop_token_ids=parts.stop_token_ids,
    )

    async def part(prompts: Sequence[Prompt]) -> tuple[list[Response], list[float]]:
        responses = await parts.pool.generate([prompt.tokens for prompt in prompts], sampling)
        scored = await asyncio.gather(
            *(parts.score(prompt, [response.tokens]) for prompt, response in zip(prompts, responses, strict=True))
        )
        return responses, [reward for (reward,) in scored if reward is not None]

    starts = range(0, len(parts.held_out), EVALUATION_REQUEST)
    judged = await asyncio.gather(*(part(parts.held_out[start : start + EVALUATION_REQUEST]) for start in starts))
    rewards = [reward for _, rewards in judged for reward in rewards]
    if not rewards:
        raise RewardsMissing(len(parts.held_out), "evaluation")
    if not sampling.temperature:
        return float(np.mean(rewards)), {}
    responses = judged[0][0]
    diff = await logprob_diff(parts.trainer, parts.held_out[: len(responses)], responses, sampling.temperature)
    return float(np.mean(rewards)), {"logprob_diff": diff}


async def logprob_diff(
    trainer: Trainer, prompts: Sequence[Prompt], responses: Sequence[Response], temperature: float
) -> float:
    """Mean absolute difference between the trainer's log-probs of responses and those that the servers gave."""
    pairs = list(zip(prompts, responses, strict=True))
    batch = supervised_batch([(prompt.tokens, response.tokens) for prompt, response in pairs])
    trained = (await trainer.log_probs(batch, temperature))[batch.fields["loss_mask"] > 0]
    return float(np.abs(trained - np.concatenate([response.logprobs for response in responses])).mean())


def describe(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """What a batch of trajectories looks like when it is trained at `version`."""
    rewards = [item.reward for item in trajectories if item.reward is not None]
    lengths = [len(item.tokens) - item.prompt_length for item in trajectories]
    staleness = [version - item.oldest_version for item in trajectories]
    return {
        "reward": float(np.mean(rewards)),
        "reward_missing": float(len(trajectories) - len(rewards)),
        "response_length": float(np.mean(lengths)),
        "truncated_share": float(np.mean([item.finish_reason is FinishReason.LENGTH for item in trajectories])),
        "staleness_mean": float(np.mean(staleness)),
        "staleness_max": float(np.max(staleness)),
    }


def evaluation_due(evaluator: EvaluatorConfig, done: int, steps: int) -> bool:
    """Whether the held-out problems are evaluated after `done` of `steps` training steps."""
    if done in (0, steps):
        return evaluator.at_start if done == 0 else evaluator.at_end
    return evaluator.freq_steps is not None and done % evaluator.freq_steps == 0
