"""A teacher's log-probs of what the policy sampled: asked for while other groups generate."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Self

import numpy as np

from areal_like.config.schema import TeacherConfig
from areal_like.errors import RunError, ServerError
from areal_like.rollout.protocol import Workflow
from areal_like.rollout.sglang.completions import EchoedCompletions
from areal_like.rollout.sglang.http import Connection, session
from areal_like.rollout.sglang.server import Server
from areal_like.types import Floats, Ints, Prompt, Trajectory, generated_in

ATTEMPTS = 3  # of a request whose failure may pass
PAUSE_S = 1.0
_PROBE = np.array([0, 1], np.int32)

type Score = Callable[[Ints, float], Awaitable[Floats]]
"""Log-probs of tokens, `[tokens]`, within a time limit in seconds."""


class Teacher(AbstractAsyncContextManager["Teacher"]):
    """Scores the trajectories of a workflow, on servers at `urls`.

    `hint` returns the tokens of a prompt as the teacher reads it; None: those of the policy. A trajectory that cannot
    be scored has no reward, so it is not trained. `say` is told the first failure of each kind, and `cancel` the number
    of generated tokens of a group that is cancelled while the teacher scores it.
    """

    def __init__(
        self,
        config: TeacherConfig,
        urls: Sequence[str],
        token: str,
        hint: Callable[[Prompt], Sequence[int]] | None = None,
        say: Callable[[str], None] = lambda text: None,
        cancel: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self._config, self._hint, self._say, self._cancel = config, hint, say, cancel
        self._session = session(token)
        self._servers = itertools.cycle([self._scorer(rank, url) for rank, url in enumerate(urls)])
        self._room = asyncio.Semaphore(config.requests)
        self._missing: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        """Have a server at `teacher.url` score two tokens. Raises RunError with its answer if it does not."""
        if self._config.url is not None:
            try:
                await self._score(_PROBE)
            except ServerError as error:
                await self._session.close()
                message = f"the server at teacher.url={self._config.url} did not score a probe of two tokens: {error}. "
                message += "The teacher must answer before the first step. Correct teacher.url, teacher.api, "
                raise RunError(f"{message}teacher.model or teacher.token_variable.") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def with_scores(self, workflow: Workflow) -> Workflow:
        """Return the workflow whose trajectories have the teacher's log-probs."""

        async def run(prompt: Prompt, group_id: int) -> list[Trajectory]:
            trajectories = await workflow(prompt, group_id)
            hinted = np.array(await asyncio.to_thread(self._hint, prompt), np.int32) if self._hint else None
            try:
                return await asyncio.gather(*(self._taught(item, len(prompt.tokens), hinted) for item in trajectories))
            except asyncio.CancelledError:
                self._cancel(generated_in(trajectories))
                raise

        return run

    def statistics(self) -> dict[str, float]:
        """Return the trajectories without the teacher's log-probs since the last call, by cause."""
        missing = {f"teacher/missing/{cause}": float(count) for cause, count in self._missing.items()}
        self._missing = Counter(dict.fromkeys(self._missing, 0))
        return missing

    async def _taught(self, item: Trajectory, n_prompt: int, hinted: Ints | None) -> Trajectory:
        cut = 0 if hinted is None else n_prompt
        tokens = item.tokens if hinted is None else np.concatenate([hinted, item.tokens[cut:]])
        try:
            async with self._room:
                scored = await self._score(tokens)
        except ServerError as error:
            if error.fault not in self._missing:
                self._say(f"teacher: a response is not trained: {error}; further errors of this kind are only counted")
            self._missing[str(error.fault)] += 1
            return replace(item, reward=None, teacher_logprobs=np.zeros(len(item.tokens), np.float32))
        logprobs = np.zeros(len(item.tokens), np.float32)
        logprobs[cut:] = scored[len(tokens) - len(item.tokens) + cut :]
        return replace(item, teacher_logprobs=np.where(item.generated, logprobs, 0).astype(np.float32))

    async def _score(self, tokens: Ints) -> Floats:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await next(self._servers)(tokens, self._config.timeout_s)
            except ServerError as error:
                if attempt == ATTEMPTS or error.fault in ("refused", "late"):
                    raise
            await asyncio.sleep(PAUSE_S)
        raise AssertionError("the last attempt returns or raises")

    def _scorer(self, rank: int, url: str) -> Score:
        name = f"teacher server {rank}"
        if self._config.url is None or self._config.api == "sglang":
            return Server(name, url, self._session, rank, aftermath_s=0).token_logprobs
        connection = Connection(name, url, self._session, aftermath_s=0)
        if self._config.model is None:
            raise ValueError("teacher.api=openai needs teacher.model")
        return EchoedCompletions(connection, self._config.model)
