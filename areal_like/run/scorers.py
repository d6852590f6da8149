"""Models that only score: reward model, judge and teacher, on servers of the run or elsewhere."""

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from areal_like.backends.ray.run import RunCluster
from areal_like.backends.ray.workers import WorkerGroup
from areal_like.core.config.schema import (
    SCORERS,
    ChatJudgeConfig,
    RewardModelConfig,
    TeacherConfig,
)
from areal_like.core.rollout.backends import DEFAULT, find_backend
from areal_like.core.rollout.pool import ServerPool
from areal_like.core.rollout.server import ServerSpec
from areal_like.data.dataset import hinted_tokens
from areal_like.job import Job
from areal_like.rewards.chat_judge import ChatJudge, JudgeServer
from areal_like.rewards.reward_model import RewardModel
from areal_like.rewards.teacher import Teacher
from areal_like.run.model_files import local_directory


@dataclass(frozen=True)
class Scorer:
    """The servers of a model that only scores, ready for requests at `urls`, and where the model lies."""

    servers: WorkerGroup
    urls: Sequence[str]
    directory: Path


async def start_scorer(
    cluster: RunCluster, job: Job, role: str, section: RewardModelConfig | TeacherConfig | ChatJudgeConfig
) -> Scorer:
    """Start the servers of the reward model, of the teacher or of the judge."""
    plan, limit = job.plan.engine(role), job.config.rollout.startup_timeout_s
    directory = await local_directory(str(section.path), f"{SCORERS[role]}.path")
    backend, classifies = find_backend(plan.backend), isinstance(section, RewardModelConfig)
    if backend.scorer_arguments is None:
        raise ValueError(f"servers of {plan.backend} do not score")
    command = backend.scorer_arguments(job.config, section, directory, plan.sizes, job.device)

    def arguments(rank: int, host: str) -> dict[str, object]:
        name = f"{role}-{rank}"
        log_file = (cluster.log_dir / f"{name}.log").absolute()
        return {"spec": ServerSpec(name, command, log_file, cluster.token, None, limit, classifies), "host": host}

    devices = [server.devices for server in plan.servers]
    servers = await cluster.start_group(role, backend.actor, devices, arguments, call_timeout_s=limit + 10)
    return Scorer(servers, await servers.call_all("start", phase="start-up"), directory)


@asynccontextmanager
async def watched_scorers(
    scorers: Mapping[str, Scorer], tasks: asyncio.TaskGroup
) -> AsyncIterator[Mapping[str, Scorer]]:
    """Yield the models that only score; if one of their servers ends, the run ends, since no other can score."""
    watching = [
        tasks.create_task(scorer.servers.call_all("watch", phase="scoring", timeout=math.inf))
        for scorer in scorers.values()
    ]
    yield scorers
    for task in watching:
        task.cancel()


def make_reward_model(
    job: Job, scorers: Mapping[str, Scorer], token: str
) -> AbstractAsyncContextManager[RewardModel | None]:
    """Return the reward model on its servers, if the run has one."""
    section = job.config.reward.model
    if section is None:
        return nullcontext()
    scorer = scorers["reward"]
    return RewardModel(scorer.urls, token, scorer.directory, section.timeout_s, job.plan.engine("reward").backend)


def make_judge_elsewhere(job: Job) -> AbstractAsyncContextManager[ChatJudge | None]:
    """Return the judge on a server that the run does not start, if there is one; entering it probes the server."""
    section = job.config.reward.judge
    if section is None or section.url is None:
        return nullcontext()
    return ChatJudge(section, job.train_prompts[0], [JudgeServer.from_config(section)])


def make_served_judge(
    job: Job, scorers: Mapping[str, Scorer], token: str
) -> AbstractAsyncContextManager[ChatJudge | None]:
    """Return the judge on servers of the run, if there is one; entering it probes a server."""
    section = job.config.reward.judge
    if section is None or "judge" not in scorers:
        return nullcontext()
    servers = [JudgeServer(f"{url}/v1", "judge", token) for url in scorers["judge"].urls]
    return ChatJudge(section, job.train_prompts[0], servers)


def make_teacher(
    job: Job, scorers: Mapping[str, Scorer], token: str, pool: ServerPool, say: Callable[[str], None]
) -> AbstractAsyncContextManager[Teacher | None]:
    """Return the teacher on its servers, if the run has one; a server elsewhere gets the user's token."""
    section, dataset = job.config.teacher, job.config.train_dataset
    if section is None:
        return nullcontext()
    field = section.hint_field
    hint = partial(hinted_tokens, dataset, job.tokenizer, field=field) if field else None
    if section.url is not None:
        token = os.environ.get(section.token_variable, "") if section.token_variable else ""
    urls = [section.url.rstrip("/")] if section.url else scorers["teacher"].urls if section.is_served else []
    policy = pool if section.from_policy else None
    backend = job.plan.engine("teacher").backend if "teacher" in scorers else DEFAULT
    return Teacher(section, urls, token, hint, say, partial(pool.set_aside, "cancelled"), policy, backend)
