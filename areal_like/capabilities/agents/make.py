"""The workflows of a run's configuration."""

import asyncio
import pickle
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self

from areal_like.capabilities.agents.branching import Branching
from areal_like.capabilities.agents.endpoint import Endpoint
from areal_like.capabilities.agents.episodes import EpisodeContext, UserWorkflow
from areal_like.capabilities.agents.forms import level_of
from areal_like.capabilities.agents.outcomes import Outcomes
from areal_like.capabilities.agents.parameters import pack_recipes
from areal_like.capabilities.agents.playing import ENTRY
from areal_like.capabilities.agents.session import Limits
from areal_like.capabilities.agents.settings import branch_of, episode_of
from areal_like.capabilities.agents.tool_parser import parser_of
from areal_like.capabilities.agents.workers.processes import UserProcesses
from areal_like.capabilities.agents.workers.remote import WorkerLimits
from areal_like.core.config.schema import EvaluationConfig, RunConfig
from areal_like.core.rollout.backends import backend_of
from areal_like.core.rollout.pool import Sampling, ServerPool
from areal_like.core.rollout.single_turn import SingleTurn
from areal_like.core.types import Score, Workflow
from areal_like.core.user_code import Portable, load_object
from areal_like.data.tokenizer import Tokenizer


def user_processes(config: RunConfig, say: Callable[[str], object], log: Path | None = None) -> UserProcesses:
    """Return the processes that run the user's workflows; their output goes to `log`."""
    episode = episode_of(config)
    functions = [Portable.pack(reference) for reference in config.workflows.values()]
    blocked_s = min(episode.blocked_s, episode.timeout_s)  # a blocked loop does not consume the time of its episodes
    limits = WorkerLimits(episode.workers, episode.loops, blocked_s, episode.memory_mb)
    return UserProcesses(ENTRY, pickle.dumps(functions), limits, say, log)


class Workflows(AbstractAsyncContextManager["Workflows"]):
    """A factory of a run's workflows for training and evaluation; `say` receives messages for the user.

    `vocab_size` is the model's, None if unknown. `processes` run the user's workflows; by default they start with the
    first use as a context.
    """

    def __init__(
        self,
        config: RunConfig,
        pool: ServerPool,
        score: Score,
        tokenizer: Tokenizer,
        say: Callable[[str], None],
        vocab_size: int | None = None,
        processes: UserProcesses | None = None,
    ) -> None:
        episode, batch = episode_of(config), config.train_dataset.batch_size * config.gconfig.n_samples
        self._config, self._say = config, say
        self._open = AsyncExitStack()
        self._context = EpisodeContext(
            pool,
            tokenizer,
            score,
            processes,
            Outcomes(batch, episode.max_failed_share, say),
            _limits(config),
            episode.timeout_s,
            parser_of(pool, episode.tool_call_parser) if episode.tool_call_parser else None,
            config.rollout.prefill_once,
            vocab_size,
            episode.on_timeout == "grade",
            backend_of(config).call_starts.get(episode.tool_call_parser or ""),
            pack_recipes(episode),
        )

    async def __aenter__(self) -> Self:
        if self._config.workflows:
            await asyncio.to_thread(_import_libraries)
            processes = self._context.processes or await self._open.enter_async_context(
                user_processes(self._config, self._say)
            )
            url = None
            if (episode := episode_of(self._config)).endpoint:
                endpoint = Endpoint(self._context.sessions, episode)
                url = (await asyncio.to_thread(self._open.enter_context, endpoint)).base_url
            self._context = replace(self._context, processes=processes, base_url=url)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    def train(self, sampling: Sampling, n_samples: int, seed: int | None = None) -> Workflow:
        """Return the run's workflow with `n_samples` episodes per prompt, which depend on `seed` if it is set."""
        return self._make(self._config.played_by, self._context, sampling, n_samples, seed)

    def evaluate(self, data: EvaluationConfig, sampling: Sampling, n_samples: int) -> Workflow:
        """Return the workflow of an evaluation set; requests may name any temperature, because nothing is trained."""
        limits = replace(self._context.limits, max_tokens=self._config.longest_generated)
        return self._make(
            data.played_by, replace(self._context, limits=limits), sampling, n_samples, None, trained=False
        )

    def _make(
        self,
        name: str | None,
        context: EpisodeContext,
        sampling: Sampling,
        n_samples: int,
        seed: int | None,
        *,
        trained: bool = True,
    ) -> Workflow:
        branch = branch_of(self._config) if trained else None
        if name is None:
            own = context.pool, context.score, sampling, n_samples
            return SingleTurn(*own, seed) if branch is None else Branching(*own, branch, seed, context.prefill_once)
        function = load_object(name)
        return UserWorkflow(
            Portable.pack(name), level_of(function) == "group", context, sampling, n_samples, seed, trained, branch
        )

    def counts(self) -> dict[str, float]:
        """Return the counts of Outcomes; empty for the built-in workflow."""
        return self._context.outcomes.counts()


def _limits(config: RunConfig) -> Limits:
    episode = episode_of(config)
    own_sampling, as_deployed = config.teacher is None, episode.history == "as_deployed"
    most = episode.max_turns, config.longest_sequence
    return Limits(*most, own_sampling, episode.models, as_deployed, episode.ignored_fields)


def _import_libraries() -> None:
    """Import libraries that sessions need at their first turn, which takes a second."""
    from transformers.utils.chat_template_utils import render_jinja_template

    _ = render_jinja_template
