"""Held-out prompts: when they are evaluated, and what the mean reward is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from areal_like.algorithms.batch import supervised_batch
from areal_like.config.schema import EvaluatorConfig, RunConfig
from areal_like.errors import RewardsMissing
from areal_like.rollout.pool import Response, Sampling
from areal_like.trainer.remote import Trainer
from areal_like.types import Prompt

if TYPE_CHECKING:
    from areal_like.loop import Parts

EVALUATION_REQUEST = 64  # prompts in one request


def evaluation_due(evaluator: EvaluatorConfig, done: int, steps: int) -> bool:
    """Whether the held-out problems are evaluated after `done` of `steps` training steps."""
    if done in (0, steps):
        return evaluator.at_start if done == 0 else evaluator.at_end
    return evaluator.freq_steps is not None and done % evaluator.freq_steps == 0


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
