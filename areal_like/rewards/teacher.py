"""A teacher's log-probs of sampled tokens, requested while other groups generate."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from areal_like.backends.http import Connection
from areal_like.core.config.schema import TeacherConfig
from areal_like.core.errors import RunError, ServerError
from areal_like.core.rollout.backends import DEFAULT, find_backend
from areal_like.core.rollout.http import Deadline, Unavailable, session
from areal_like.core.rollout.pool import ServerPool
from areal_like.core.rollout.server import Server
from areal_like.core.types import (
    TEACHER_IDS,
    TEACHER_LOGPROBS,
    TEACHER_TOP,
    Floats,
    Ints,
    Prompt,
    Trajectory,
    Workflow,
    generated_in,
)

ATTEMPTS = 3  # of a request whose failure may pass
PAUSE_S = 1.0
_PROBE = np.array([0, 1], np.int32)

type Scores = Mapping[str, NDArray[Any]]
type Score = Callable[[Ints, int, float], Awaitable[Scores]]
"""The teacher's columns of tokens after the token at a place: log-probs, and the likeliest ids if they are asked for.

Within a time limit in seconds.
"""


class Teacher(AbstractAsyncContextManager["Teacher"]):
    """Scores the trajectories of a workflow, on servers at `urls`, or on the servers of the `policy` if it is given.

    `hint` returns the tokens of a prompt as the teacher reads it; None: the policy's tokens. A trajectory that cannot
    be scored has no reward, so it is not trained. `say` receives the first failure of each kind, and `cancel` the
    number of generated tokens of a group that is cancelled while the teacher scores it.
    """

    def __init__(
        self,
        config: TeacherConfig,
        urls: Sequence[str],
        token: str,
        hint: Callable[[Prompt], Sequence[int]] | None = None,
        say: Callable[[str], None] = lambda text: None,
        cancel: Callable[[int], None] = lambda tokens: None,
        policy: ServerPool | None = None,
        backend: str = DEFAULT,
    ) -> None:
        self._config, self._hint, self._say, self._cancel = config, hint, say, cancel
        self._session = session(token)
        connect = Connection if config.api == "openai" and config.url else find_backend(backend).connect
        names = [f"teacher server {rank}" for rank in range(len(urls))]
        self._own: list[Any] = [
            connect(name, url, self._session, aftermath_s=0) for name, url in zip(names, urls, strict=True)
        ]
        scorers = [self._of_policy(policy)] if policy else [self._scorer(server) for server in self._own]
        self._servers = itertools.cycle(scorers)
        self._loads = 0
        self._room = asyncio.Semaphore(config.requests)
        self._missing: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        """Score two tokens on a server at `teacher.url`. Raises RunError with its answer if it fails."""
        if self._config.url is not None:
            try:
                await self._score(_PROBE, 0)
            except ServerError as error:
                await self._session.close()
                message = f"the server at teacher.url={self._config.url} did not score a probe of two tokens: {error}. "
                message += "The teacher must answer before the first step. Correct teacher.url, teacher.api, "
                raise RunError(f"{message}teacher.model or teacher.token_variable.") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def load(self, path: Path, timeout_s: float) -> None:
        """Load a Hugging Face checkpoint on all servers, which finish earlier requests before."""
        self._loads += 1  # later requests name it, as the servers keep values of older weights
        await asyncio.gather(*(server.load(str(path), self._loads, timeout_s) for server in self._own))

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
        first = int(np.argmax(item.generated)) + len(tokens) - len(item.tokens)
        start = max(0, first - 1)  # nothing before is needed, so that equal prompts are computed once
        try:
            async with self._room:
                scored = await self._score(tokens, start)
        except ServerError as error:
            if error.fault not in self._missing:
                self._say(f"teacher: a response is not trained: {error}; further errors of this kind are only counted")
            self._missing[str(error.fault)] += 1
            return replace(item, reward=None)
        taught = {name: _pick_generated(values, item, cut) for name, values in scored.items()}
        return replace(item, columns={**item.columns, **taught})

    async def _score(self, tokens: Ints, start: int) -> Scores:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await next(self._servers)(tokens, start, self._config.timeout_s)
            except ServerError as error:
                if attempt == ATTEMPTS or error.fault in ("refused", "late"):
                    raise
            await asyncio.sleep(PAUSE_S)
        raise AssertionError("the last attempt returns or raises")

    def _scorer(self, server: Any) -> Score:
        if isinstance(server, Connection):
            return self._of_completions(server)

        async def score(tokens: Ints, start: int, timeout_s: float) -> Scores:
            cache = f"teacher {self._loads}" if self._loads else None
            return await self._of_server(server, tokens, start, timeout_s, cache)

        return score

    def _of_policy(self, pool: ServerPool) -> Score:
        """Return a scorer with the present weights, which reuses no values of other weights."""
        turn = itertools.count()

        async def score(tokens: Ints, start: int, timeout_s: float) -> Scores:
            deadline = Deadline(timeout_s)
            while not (serving := pool.serving):
                if deadline.passed:
                    raise Unavailable(f"no server of the policy held its weights within {timeout_s:g} s", "late")
                await asyncio.sleep(PAUSE_S)
            server = serving[next(turn) % len(serving)]
            return await self._of_server(server, tokens, start, deadline.left, f"teacher {pool.version}")

        return score

    def _of_completions(self, connection: Connection) -> Score:
        if self._config.model is None:
            raise ValueError("teacher.api=openai needs teacher.model")
        echoed = EchoedCompletions(connection, self._config.model)

        async def score(tokens: Ints, start: int, timeout_s: float) -> Scores:
            return {TEACHER_LOGPROBS: await echoed(tokens, timeout_s)}

        return score

    async def _of_server(self, server: Server, tokens: Ints, start: int, timeout_s: float, cache: str | None) -> Scores:
        if self._config.top_k is None:
            return {TEACHER_LOGPROBS: await server.token_logprobs(tokens, timeout_s, start=start, cache=cache)}
        scored = await server.top_ids(tokens, self._config.top_k, timeout_s, start=start, cache=cache)
        return dict(zip((TEACHER_LOGPROBS, TEACHER_IDS, TEACHER_TOP), scored, strict=True))


def _pick_generated(scored: NDArray[Any], item: Trajectory, cut: int) -> NDArray[Any]:
    """Return the last values at the trajectory's tokens from `cut` on, 0 where no model generated the token."""
    values = np.zeros((len(item.tokens), *scored.shape[1:]), scored.dtype)
    values[cut:] = scored[len(scored) - len(item.tokens) + cut :]
    values[~item.generated] = 0
    return values


class EchoedCompletions:
    """Log-probs of tokens by completions whose prompt is echoed, at temperature 1."""

    PATH = "/v1/completions"

    def __init__(self, connection: Connection, model: str) -> None:
        self._connection, self._model = connection, model

    async def __call__(self, tokens: Ints, timeout_s: float) -> Floats:
        """Return the log-prob of each token after those before it, `[tokens]`; 0 for the first one."""
        body = {"model": self._model, "prompt": tokens, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 1}
        answer = await self._connection.post(self.PATH, body, timeout_s)
        with self._connection.reading(self.PATH):
            (choice,) = answer["choices"]
            scored = choice["logprobs"]["token_logprobs"][: len(tokens)]
            if len(scored) != len(tokens):
                raise ValueError(f"{len(scored)} log-probs for {len(tokens)} tokens: the server does not echo")
            return np.array([0.0, *map(float, scored[1:])], np.float32)
