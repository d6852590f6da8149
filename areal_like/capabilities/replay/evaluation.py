"""Evaluation of replayed weights: by the run's servers, on its evaluation prompts, as its evaluator does it."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from areal_like.backends.ray.workers import WorkerGroup
from areal_like.capabilities.replay.replayer import NoRecord, Replay
from areal_like.core.errors import CheckpointError
from areal_like.core.types import Trajectory
from areal_like.job import Job
from areal_like.metrics.console import View
from areal_like.run.collecting import make_evaluator
from areal_like.run.gpu_sharing import connect
from areal_like.run.servers import start_servers
from areal_like.run.serving import open_serving

type PromptRewards = Mapping[int, float]  # mean reward of each prompt's samples, by the prompt's number


def check_evaluation(job: Job) -> None:
    """Raise CheckpointError if a run has nothing to evaluate."""
    if not job.config.evaluations:
        raise CheckpointError("--evaluate needs evaluation prompts, and the run has none. Set `valid_dataset.path`")


async def evaluate(replay: Replay, logs: Path) -> dict[str, PromptRewards]:
    """Start the servers, send them the present weights, and return the rewards of each evaluation set."""
    cluster, trainers = replay.cluster, replay.trainers
    job = replace(replay.job, config=replay.job.config.model_copy(update={"teacher": None}))  # scores samples to train

    async def start(_: asyncio.TaskGroup) -> tuple[None, WorkerGroup, list[str]]:
        if job.config.rollout.alternates:  # servers take all free memory
            await asyncio.gather(*(each.offload() for each in trainers.values()))
        return None, *await start_servers(cluster, job, replay.model)

    async with open_serving(cluster, job, replay.model, View(enabled=False), logs, start) as (serving, _):
        sharing, _ = await connect(cluster, job, serving, trainers, replay.version, NoRecord().phase)
        await sharing.to_servers()
        workflows = {name: own.workflows for name, own in serving.scoring.items()}
        results = await make_evaluator(job, workflows).evaluate()
    return {name: rewards_by_prompt(result.trajectories) for name, result in results.items()}


def rewards_by_prompt(trajectories: Sequence[Trajectory]) -> PromptRewards:
    """Return the mean reward of each prompt; a sample may have several trajectories, and a prompt no reward."""
    samples = defaultdict[int, dict[int, float]](dict)
    for item in trajectories:
        if item.reward is not None:
            samples[item.group_id][item.sample] = item.reward
    return {prompt: float(np.mean(list(rewards.values()))) for prompt, rewards in samples.items()}


def describe_rewards(
    recorded: Mapping[str, PromptRewards], changed: Mapping[str, PromptRewards], step: int
) -> Iterator[str]:
    """Yield a line for each set: both rewards, and their difference on the same prompts, with standard errors."""
    for name, before in recorded.items():
        after = changed[name]
        prompts = sorted(before.keys() & after.keys())
        if not prompts:
            yield f"{name} after step {step}: no prompt has rewards with both settings"
            continue
        values = [np.array([of_it[prompt] for prompt in prompts]) for of_it in (before, after)]
        own, other, apart = (_mean_and_error(each) for each in (*values, values[1] - values[0]))
        yield (
            f"{name} after step {step}: reward {own} as recorded, {other} with the changes; "
            f"difference {apart} ({len(prompts)} prompts)"
        )


def _mean_and_error(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> str:
    """Return the mean and its standard error, which one value does not have."""
    error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{np.mean(values):.4f} ± {error:.4f}"
