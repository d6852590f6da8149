"""Single-turn groups: a prompt, n samples, and a reward for each."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from areal_like.config.schema import EvaluationConfig
from areal_like.rollout.pool import Sampling, ServerPool
from areal_like.rollout.protocol import Score
from areal_like.rollout.turns import Turns
from areal_like.types import Prompt, Trajectory
from areal_like.workflows.joining import as_response, join_parts

TRAJECTORIES = 4  # created per iteration of the event loop; allocating one of 16k tokens takes up to 1 ms


@dataclass(frozen=True)
class SingleTurn:
    """The workflow of a group of independent samples; with a `seed` they depend on it and on the group's id."""

    pool: ServerPool
    score: Score
    sampling: Sampling
    n_samples: int
    seed: int | None = None
    turn: Turns = field(default_factory=lambda: Turns(TRAJECTORIES))

    async def __call__(self, prompt: Prompt, group_id: int) -> list[Trajectory]:
        """See Workflow."""
        seeds = None if self.seed is None else sample_seeds(self.seed, group_id, self.n_samples)
        tokens = np.array(prompt.tokens, np.int32)
        responses = await self.pool.generate([tokens] * self.n_samples, self.sampling, seeds, group_id, prompt.images)
        try:
            rewards = await self.score(prompt, [response.tokens for response in responses])
            start, trajectories = as_response(tokens), list[Trajectory]()
            for sample, (response, reward) in enumerate(zip(responses, rewards, strict=True)):
                await self.turn()
                trajectories.append(join_parts(prompt, group_id, [start, response], reward, sample))
            return trajectories
        except asyncio.CancelledError:
            self.pool.cancel(responses)
            raise


@dataclass(frozen=True)
class SingleTurns:
    """The factory of a run without other workflows; see MakesWorkflows."""

    pool: ServerPool
    score: Score

    def train(self, sampling: Sampling, n_samples: int, seed: int | None = None) -> SingleTurn:
        """Return the run's workflow."""
        return SingleTurn(self.pool, self.score, sampling, n_samples, seed)

    def evaluate(self, data: EvaluationConfig, sampling: Sampling, n_samples: int) -> SingleTurn:
        """Return the workflow of an evaluation set."""
        return SingleTurn(self.pool, self.score, sampling, n_samples)

    def counts(self) -> Mapping[str, float]:
        """Return nothing: every sample is a trajectory."""
        return {}


def sample_seeds(seed: int, group_id: int, n_samples: int) -> list[int]:
    """Return a seed for each sample of a group."""
    return np.random.SeedSequence([seed, group_id]).generate_state(n_samples).tolist()
