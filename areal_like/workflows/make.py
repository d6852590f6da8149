"""The workflow of a run's configuration."""

import asyncio
import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from areal_like.config.schema import SINGLE_TURN, RunConfig
from areal_like.data.tokenizer import Tokenizer
from areal_like.errors import ServerError
from areal_like.rollout.backends import backend_of
from areal_like.rollout.http import Unavailable
from areal_like.rollout.pool import Sampling, ServerPool
from areal_like.rollout.protocol import Score, Workflow
from areal_like.runtime.processes import UserProcesses
from areal_like.runtime.remote import WorkerLimits as ProcessLimits
from areal_like.runtime.user_code import Portable, load_object
from areal_like.workflows.branching import built_in
from areal_like.workflows.conversation import parsed_arguments
from areal_like.workflows.endpoint import Endpoint, EndpointSettings
from areal_like.workflows.episodes import EpisodeContext, UserWorkflow
from areal_like.workflows.forms import level_of
from areal_like.workflows.openai_api import OpenSessions
from areal_like.workflows.outcomes import Outcomes
from areal_like.workflows.playing import ENTRY
from areal_like.workflows.sandbox.backends import Recipe
from areal_like.workflows.session import Limits, ParseTools, Refused

PARSING_TIMEOUT_S = 60.0
MOST_PARSERS = 2  # servers tried for parsing a text


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
        episode, batch = config.episode, config.train_dataset.batch_size * config.gconfig.n_samples
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
            _parser(pool, episode.tool_call_parser) if episode.tool_call_parser else None,
            OpenSessions(),
            None,
            config.rollout.prefill_once,
            vocab_size,
            episode.on_timeout == "grade",
            Recipe.pack(episode.sandbox) if episode.sandbox else None,
            backend_of(config).call_starts.get(episode.tool_call_parser or ""),
            episode.mcp_servers,
        )

    async def __aenter__(self) -> Self:
        if self._config.workflows:
            await asyncio.to_thread(_import_libraries)
            processes = self._context.processes or await self._open.enter_async_context(
                user_processes(self._config, self._say)
            )
            url = None
            if self._config.episode.endpoint:
                endpoint = Endpoint(self._context.sessions, EndpointSettings.from_config(self._config.episode))
                url = (await asyncio.to_thread(self._open.enter_context, endpoint)).base_url
            self._context = replace(self._context, processes=processes, base_url=url)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    def train(self, sampling: Sampling, n_samples: int, seed: int | None = None) -> Workflow:
        """Return the run's workflow with `n_samples` episodes per prompt, which depend on `seed` if it is set."""
        return self._make(self._config.workflow or SINGLE_TURN, self._context, sampling, n_samples, seed)

    def evaluate(self, workflow: str, sampling: Sampling, n_samples: int) -> Workflow:
        """Return the workflow of an evaluation set; requests may name any temperature, because nothing is trained."""
        limits = replace(self._context.limits, max_tokens=self._config.longest_generated)
        return self._make(workflow, replace(self._context, limits=limits), sampling, n_samples, None, trained=False)

    def _make(
        self,
        name: str,
        context: EpisodeContext,
        sampling: Sampling,
        n_samples: int,
        seed: int | None,
        *,
        trained: bool = True,
    ) -> Workflow:
        branch = self._config.rollout.branch if trained else None
        if name == SINGLE_TURN:
            return built_in(
                context.pool, context.score, sampling, n_samples, seed, branch, prefill_once=context.prefill_once
            )
        function = load_object(name)
        return UserWorkflow(
            Portable.pack(name), level_of(function) == "group", context, sampling, n_samples, seed, trained, branch
        )

    def counts(self) -> dict[str, float]:
        """Return the counts of Outcomes; empty for the built-in workflow."""
        return self._context.outcomes.counts()


def _limits(config: RunConfig) -> Limits:
    episode = config.episode
    own_sampling, as_deployed = config.teacher is None, episode.history == "as_deployed"
    most = episode.max_turns, config.longest_sequence
    return Limits(*most, own_sampling, episode.models, as_deployed, episode.ignored_fields)


def user_processes(config: RunConfig, say: Callable[[str], object], log: Path | None = None) -> UserProcesses:
    """Return the processes that run the user's workflows; their output goes to `log`."""
    episode = config.episode
    functions = [Portable.pack(reference) for reference in config.workflows.values()]
    blocked_s = min(episode.blocked_s, episode.timeout_s)  # a blocked loop does not consume the time of its episodes
    limits = ProcessLimits(episode.workers, episode.loops, blocked_s, episode.memory_mb)
    return UserProcesses(ENTRY, pickle.dumps(functions), limits, say, log)


def _import_libraries() -> None:
    """Import libraries that sessions need at their first turn, which takes a second."""
    from transformers.utils.chat_template_utils import render_jinja_template

    _ = render_jinja_template


def _parser(pool: ServerPool, name: str) -> ParseTools:
    """Return SGLang's parser of a model family's tool calls; it runs in a server, because it imports torch."""

    async def parse(text: str, tools: Sequence[dict[str, Any]]) -> tuple[str, list[tuple[str, Any]]]:
        for server in pool.servers[:MOST_PARSERS]:
            try:
                remaining, found = await server.parse_tools(text, tools, name, PARSING_TIMEOUT_S)
            except Unavailable:  # the server is down, or its parser fails on this text
                continue
            except ServerError as error:
                raise Refused(f"tools: the server cannot parse tool calls: {error}", "tools") from error
            return remaining, [(called, parsed_arguments(parameters)) for called, parameters in found]
        return text, []

    return parse
