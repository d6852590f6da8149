"""The servers as episodes see them: the policy's pool, reward model and teacher, and what uses them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from areal_like.backends.ray.run import RunCluster
from areal_like.backends.ray.workers import WorkerGroup
from areal_like.capability import open_workflows
from areal_like.core.rollout.pool import ServerPool
from areal_like.job import Job
from areal_like.metrics.console import View
from areal_like.run.ready import Serving
from areal_like.run.scorers import (
    make_judge_elsewhere,
    make_reward_model,
    make_served_judge,
    make_teacher,
    start_scorer,
    watched_scorers,
)
from areal_like.run.scoring import make_scoring
from areal_like.run.servers import make_supervisor
from areal_like.run.transport import make_file_source

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
