"""Agents: workflows of users, the APIs that record their requests, and groups whose samples branch."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path

from areal_like.capabilities.agents.checks import check_workflow, scores_episodes
from areal_like.capabilities.agents.make import Workflows, user_processes
from areal_like.capabilities.agents.settings import branch_of
from areal_like.capability import Capability, OpenWorkflows
from areal_like.job import Job


@asynccontextmanager
async def _open(job: Job, say: Callable[[str], None], logs: Path) -> AsyncIterator[OpenWorkflows]:
    played, spec = bool(job.config.workflows), job.models.get("actor")
    async with user_processes(job.config, say, logs / "workflows.log") if played else nullcontext() as processes:
        yield lambda own, pool, score: Workflows(
            own.config, pool, score, job.tokenizer, say, spec.vocab_size if spec else None, processes
        )


def open_workflows(
    job: Job, say: Callable[[str], None], logs: Path
) -> AbstractAsyncContextManager[OpenWorkflows] | None:
    """Return the factory of a run's workflows, None where all are the built-in one and no sample branches."""
    needed = any(own.config.workflows or branch_of(own.config) for own in (job, *job.adapters))
    return _open(job, say, logs) if needed else None


CAPABILITY = Capability(checks=[check_workflow], workflows=open_workflows, scores_episodes=scores_episodes)
