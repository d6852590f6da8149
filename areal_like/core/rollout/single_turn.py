"""Workflows, and the built-in one of single-turn groups: a prompt, n samples, and a reward for each."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from areal_like.core.config.schema import EvaluationConfig
from areal_like.core.rollout.joining import as_response, join_parts
from areal_like.core.rollout.pool import ServerPool
from areal_like.core.rollout.sample import Sampling
from areal_like.core.rollout.turns import Turns
from areal_like.core.types import Prompt, Score, Trajectory, Workflow


class MakesWorkflows(Protocol):
    """A factory of workflows for training and evaluation."""

    def train(self, sampling: Sampling, n_samples: int, seed: int | None = None) -> Workflow:
        """Return the run's workflow with `n_samples` per prompt, which depend on `seed` if it is set."""

    def evaluate(self, data: EvaluationConfig, sampling: Sampling, n_samples: int) -> Workflow:
        """Return the workflow of an evaluation set."""

    def counts(self) -> Mapping[str, float]:
        """Return counts since the last call, by the names of their metrics."""


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
