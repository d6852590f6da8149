"""The servers as episodes see them: the policy's pool, reward model and teacher, and what uses them."""

import asyncio
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from urllib.parse import quote

from areal_like.backends.ray.interfaces import own_address, own_host
from areal_like.backends.ray.ray_cluster import LOOPBACK
from areal_like.backends.ray.run import RunCluster
from areal_like.backends.ray.workers import WorkerGroup
from areal_like.backends.transports.deltas.file_server import FileServer
from areal_like.capability import open_workflows
from areal_like.core.config.schema import OWN_FILES, RunConfig
from areal_like.core.rollout.backends import DEFAULT
from areal_like.core.rollout.pool import ServerPool
from areal_like.core.transfer import FileSource
from areal_like.data.dataset import hinted_tokens
from areal_like.job import Job
from areal_like.metrics.console import View
from areal_like.rewards.chat_judge import ChatJudge, JudgeServer
from areal_like.rewards.reward_model import RewardModel
from areal_like.rewards.teacher import Teacher
from areal_like.run.ready import Serving
from areal_like.run.scoring import make_scoring
from areal_like.run.start import Scorer, make_supervisor, start_scorer

type StartServers[T] = Callable[[asyncio.TaskGroup], Awaitable[tuple[T, WorkerGroup, list[str]]]]


@asynccontextmanager
async def open_serving[T](
    cluster: RunCluster, job: Job, model: Path, view: View, logs: Path, start: StartServers[T]
) -> AsyncIterator[tuple[Serving, T]]:
    """Yield the servers with their clients, and the first result of `start`, which starts the policy's servers.

    Models that only score start beside it. Servers are watched, and restarted from `model`, until the block ends.
    """
    async with (
        make_judge_elsewhere(job) as elsewhere,
        open_workflows(job, view.say, logs) as make_workflows,
        asyncio.TaskGroup() as tasks,
    ):
        scorers = {
            role: tasks.create_task(start_scorer(cluster, job, role, section))
            for role, section in job.config.scorers.items()
        }
        started, servers, urls = await start(tasks)
        async with (
            make_pool(job, urls, cluster.token) as pool,
            watched_scorers({role: await task for role, task in scorers.items()}, tasks) as scoring,
            make_reward_model(job, scoring, cluster.token) as reward_model,
            make_served_judge(job, scoring, cluster.token) as served,
            make_teacher(job, scoring, cluster.token, pool, view.say) as teacher,
            make_file_source(cluster, job.config) as source,
            make_scoring(
                job, pool, view, logs / "rewards.log", make_workflows, reward_model, elsewhere or served
            ) as scored,
        ):
            supervisor = make_supervisor(cluster, job, model, servers, pool, view.say)
            watching = tasks.create_task(supervisor.keep())
            yield Serving(pool, scored, teacher, source), started
        watching.cancel()


def make_pool(job: Job, urls: list[str], token: str) -> ServerPool:
    """Return the pool of the policy's servers."""
    config = job.config
    return ServerPool(
        urls,
        token,
        config.rollout.request_timeout_s,
        requests=config.weight_update.requests,
        prefill_once=config.rollout.prefill_once,
        host_timeout_s=config.host_timeout_s or 0.0,
        backend=job.plan.engine("rollout").backend,
    )


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


@asynccontextmanager
async def make_file_source(cluster: RunCluster, config: RunConfig) -> AsyncIterator[FileSource | None]:
    """Yield where servers download weights, None if they do not (`weight_update.url`)."""
    update, directory = config.weight_update, cluster.shared_dir
    if update.url is None or update.mode != "disk":
        yield None
    elif update.url == OWN_FILES:
        host = LOOPBACK if config.scheduler.type == "local" else _own_host(config.cluster.interface)
        with FileServer(directory, host, cluster.token) as url:
            yield FileSource(url, cluster.token)
    else:
        token = os.environ.get(update.token_variable) if update.token_variable else None
        path = directory.relative_to(Path(config.cluster.fileroot).absolute()).as_posix()
        yield FileSource(f"{update.url.rstrip('/')}/{quote(path)}", token)


def _own_host(interface: str | None) -> str:
    """Return this host's address for the servers of the run. Raises ClusterError."""
    if interface is not None:
        return own_host(interface)
    return own_address("Set cluster.interface to an interface that all nodes have")


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
