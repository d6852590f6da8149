"""The rewards and workflows of a run, for each of several adapters its own."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from areal_like.capability import OpenWorkflows
from areal_like.job import Job
from areal_like.metrics.console import View
from areal_like.rewards.chat_judge import ChatJudge
from areal_like.rewards.scoring import Judge, Rewards
from areal_like.rollout.pool import ServerPool
from areal_like.run.ready import Scoring


@asynccontextmanager
async def make_scoring(
    job: Job,
    pool: ServerPool,
    view: View,
    log: Path,
    make_workflows: OpenWorkflows,
    model: Judge | None,
    chat: ChatJudge | None,
) -> AsyncIterator[Mapping[str, Scoring]]:
    """Yield the scoring of each adapter by its name, a run without several adapters uses ""."""
    found = dict[str, Scoring]()
    async with AsyncExitStack() as entered:
        for own in job.adapters or [job]:
            config = own.config
            rewards = Rewards(config.reward, job.tokenizer, model=model, chat=chat, log=log, say=view.say)
            await entered.enter_async_context(rewards)
            workflows = await entered.enter_async_context(make_workflows(own, pool, rewards.score))
            if not config.workflows:  # which may score by themselves
                rewards.begin()
            found[own.adapter or ""] = Scoring(rewards, workflows)
        yield found
