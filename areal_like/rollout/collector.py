"""Keeps groups generating while the trainer trains, and hands out batches that are fresh enough."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

import numpy as np

from areal_like.rollout.admission import Admission
from areal_like.rollout.pool import Response, Sampling, ServerPool
from areal_like.types import FinishReason, Prompt, Trajectory

Score = Callable[[Prompt, Sequence[Sequence[int]]], Awaitable[Sequence[float | None]]]


class Collector:
    """Groups of samples, from prompt to scored trajectories, as many at once as the staleness bound admits.

    Every admitted group is handed out exactly once. Groups run as tasks of `tasks`, so the first one that fails
    ends the run. With a `seed`, a group's samples depend on it and the group's id. `score` gives one reward, or None
    where it is missing, per response of a prompt.
    """

    def __init__(
        self,
        *,
        prompts: Iterator[Prompt],
        groups: int,
        n_samples: int,
        sampling: Sampling,
        seed: int | None,
        admission: Admission,
        max_concurrent: int | None,
        pool: ServerPool,
        score: Score,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._prompts = prompts
        self._groups = groups
        self._n_samples = n_samples
        self._sampling = sampling
        self._seed = seed
        self._admission = admission
        self._max_groups = max(1, max_concurrent // n_samples) if max_concurrent else None
        self._pool = pool
        self._score = score
        self._tasks = tasks
        self._started = 0
        self._running = 0
        self._finished: dict[int, list[Trajectory]] = {}
        self.tokens_generated = 0  # in the responses of finished groups
        self._progress = asyncio.Event()

    async def next_batch(self) -> list[Trajectory]:
        """Wait for the next batch; its groups are complete, in order of age."""
        self._fill()
        while (groups := self._admission.take(self._finished)) is None:
            self._progress.clear()
            await self._progress.wait()
        batch = [trajectory for group in groups for trajectory in self._finished.pop(group)]
        self._fill()
        return batch

    def publish(self, version: int) -> None:
        """Every server holds `version`: start what that admits."""
        self._admission.publish(version)
        self._fill()

    def _fill(self) -> None:
        while self._started < self._groups and self._admission.capacity and self._running != self._max_groups:
            group_id, prompt = self._started, next(self._prompts)
            self._admission.start(group_id)
            self._started += 1
            self._running += 1
            self._tasks.create_task(self._run(group_id, prompt), name=f"group {group_id}")

    async def _run(self, group_id: int, prompt: Prompt) -> None:
        seeds = None if self._seed is None else sample_seeds(self._seed, group_id, self._n_samples)
        responses = await self._pool.generate([prompt.tokens] * self._n_samples, self._sampling, seeds)
        rewards = await self._score(prompt, [response.tokens for response in responses])
        self._finished[group_id] = [
            trajectory(prompt, group_id, response, reward) for response, reward in zip(responses, rewards, strict=True)
        ]
        self.tokens_generated += sum(len(response.tokens) for response in responses)
        self._running -= 1
        self._progress.set()
        self._fill()


def sample_seeds(seed: int, group_id: int, n_samples: int) -> list[int]:
    """A seed for each sample of a group."""
    return np.random.SeedSequence([seed, group_id]).generate_state(n_samples).tolist()


def trajectory(prompt: Prompt, group_id: int, response: Response, reward: float | None) -> Trajectory:
    """Join a prompt and one response to it."""
    start = len(prompt.tokens)
    return Trajectory(
        sample_id=prompt.sample_id,
        group_id=group_id,
        tokens=np.array([*prompt.tokens, *response.tokens], np.int32),
        logprobs=np.array([0.0] * start + response.logprobs, np.float32),
        versions=np.array([-1] * start + response.versions, np.int32),
        finish_reason=response.finish_reason or FinishReason.LENGTH,
        reward=reward,
    )
