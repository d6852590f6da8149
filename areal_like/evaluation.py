"""Held-out prompts: when they are evaluated, and what the mean reward is."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areal_like.config.schema import EvaluatorConfig
from areal_like.errors import RewardsMissing
from areal_like.rollout.pool import Sampling, ServerPool
from areal_like.types import Prompt, Reward
from areal_like.workflows.protocol import Score

PROMPTS_PER_REQUEST = 64


@dataclass(frozen=True)
class Evaluator:
    """Held-out prompts, and all it takes to judge what the servers answer them."""

    config: EvaluatorConfig
    prompts: Sequence[Prompt]
    sampling: Sampling
    pool: ServerPool
    score: Score

    def due(self, done: int, steps: int) -> bool:
        """Whether to evaluate after `done` of `steps` training steps."""
        if not self.prompts:
            return False
        if done in (0, steps):
            return self.config.at_start if done == 0 else self.config.at_end
        return self.config.freq_steps is not None and done % self.config.freq_steps == 0

    async def reward(self) -> float:
        """Mean reward with the weights that the servers hold; missing rewards do not count.

        Raises RewardsMissing where all of them are missing.
        """
        starts = range(0, len(self.prompts), PROMPTS_PER_REQUEST)
        parts = [self.prompts[start : start + PROMPTS_PER_REQUEST] for start in starts]
        judged = await asyncio.gather(*map(self._rewards, parts))
        rewards = [reward.value for part in judged for (reward,) in part if reward.value is not None]
        if not rewards:
            raise RewardsMissing(len(self.prompts), "evaluation")
        return float(np.mean(rewards))

    async def _rewards(self, prompts: Sequence[Prompt]) -> list[Sequence[Reward]]:
        responses = await self.pool.generate([prompt.tokens for prompt in prompts], self.sampling)
        pairs = zip(prompts, responses, strict=True)
        return await asyncio.gather(*(self.score(prompt, [response.tokens]) for prompt, response in pairs))
