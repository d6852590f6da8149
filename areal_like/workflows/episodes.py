"""Workflows written by users: `async def run(row, client)` for each episode, or `run(prompt, n, rollout)` for a group.

An episode that fails gives trajectories without a reward, or none, is counted by its cause, and never ends the run;
only a whole batch of which more than `episode.max_failed_share` fails does. See docs/workflows.md.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from areal_like.data.tokenizer import Tokenizer
from areal_like.rewards.functions import VALUE, as_reward
from areal_like.rollout.pool import LONG_PROMPT, Response, Sampling, ServerPool
from areal_like.rollout.protocol import Score
from areal_like.runtime.user_code import UserCodeError, where_it_failed
from areal_like.types import FinishReason, Ints, Prompt, Reward, Trajectory, generated_in
from areal_like.workflows.client import Clients
from areal_like.workflows.group import Rollout
from areal_like.workflows.outcomes import Outcomes
from areal_like.workflows.provenance import NotGenerated, Responses
from areal_like.workflows.session import Limits, ParseTools, Session
from areal_like.workflows.user_loop import CancelledWithin, TimeLimit, UserLoop, in_loop

type Made = list[tuple[int, Response]]
"""The responses that were generated for a group, each with the number of its session."""


class EpisodeError(Exception):
    """An episode failed: `cause` is a word that is counted, the message says more."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True)
class EpisodeContext:
    """What the episodes of a run have in common."""

    pool: ServerPool
    tokenizer: Tokenizer
    score: Score
    users: UserLoop
    outcomes: Outcomes
    limits: Limits
    timeout_s: float
    parse_tools: ParseTools | None
    clients: Clients
    prefill_once: bool
    vocab_size: int | None = None  # of the model, where its files are here


class Prefills:
    """Has a server cache what the episodes of one group begin with: arriving together, each would prefill it."""

    def __init__(self, pool: ServerPool, group_id: int) -> None:
        self._pool, self._group_id = pool, group_id
        self._begun: dict[bytes, asyncio.Task[None]] = {}

    async def of(self, tokens: Sequence[int], sampling: Sampling) -> None:
        """Return when these tokens are cached; they are sent once, for one token that nobody needs.

        At once where they are so few that to wait would cost more (LONG_PROMPT).
        """
        if len(tokens) < LONG_PROMPT:
            return
        key = np.array(tokens, np.int32).tobytes()
        if key not in self._begun:
            self._begun[key] = asyncio.create_task(self._prefill(tokens, replace(sampling, max_new_tokens=1)))
        await asyncio.shield(self._begun[key])

    async def _prefill(self, tokens: Sequence[int], shortest: Sampling) -> None:
        response = await self._pool.sample(tokens, shortest, priority=self._group_id, session=self._group_id)
        self._pool.cancel([response])


@dataclass(frozen=True)
class UserWorkflow:
    """The workflow of a user's function; `per_group` says which of the two forms it has.

    With `trained` false, as in evaluation, requests may name any temperature, and are sampled as `sampling` says.
    """

    function: Callable[..., Awaitable[Any]]
    per_group: bool
    scene: EpisodeContext
    sampling: Sampling
    n_samples: int
    seed: int | None = None
    trained: bool = True

    async def __call__(self, prompt: Prompt, group_id: int) -> list[Trajectory]:
        """See Workflow."""
        # what depends on a seed alone must not depend on what the cache holds
        prefills = Prefills(self.scene.pool, group_id) if self.scene.prefill_once and self.seed is None else None
        if self.per_group:
            return await self._group(prompt, group_id, prefills)
        made: Made = []
        sessions = [self._session(group_id, number, prefills, made) for number in range(self.n_samples)]
        with self._broken_off(made):
            episodes = await asyncio.gather(*(self._episode(prompt, group_id, *each) for each in enumerate(sessions)))
        trajectories = [trajectory for episode in episodes for trajectory in episode]
        self._count_unused(made, sessions, trajectories)
        return trajectories

    async def _episode(self, prompt: Prompt, group_id: int, number: int, session: Session) -> list[Trajectory]:
        reward = Reward(None)
        try:
            returned = await self._run(lambda: self._with_client(session, prompt), [session])
            reward = _reward(returned)
            if not session.read:
                raise EpisodeError("nothing generated", "it returned a reward without a completion of the client")
            self.scene.outcomes.add(None)
        except EpisodeError as error:
            self.scene.outcomes.add(error.cause, str(error))
        return [replace(t, sample=number) for t in session.trajectories(prompt, group_id, reward)]

    async def _with_client(self, session: Session, prompt: Prompt) -> Any:
        with self.scene.clients.of(session) as client:
            return await self.function(_copied(dict(prompt.row)), client)

    async def _group(self, prompt: Prompt, group_id: int, prefills: Prefills | None) -> list[Trajectory]:
        sessions: list[Session] = []
        made: Made = []

        main = asyncio.get_running_loop()

        def session() -> Session:
            sessions.append(self._session(group_id, len(sessions), prefills, made, main))
            return sessions[-1]

        scene, own = self.scene, replace(prompt, row=_copied(dict(prompt.row)), tokens=list(prompt.tokens))
        rollout = Rollout(
            own,
            group_id,
            scene.tokenizer,
            self.sampling,
            self._score(prompt),
            scene.pool.version,
            session,
            scene.clients,
            scene.vocab_size,
        )
        try:
            with self._broken_off(made):
                returned = await self._run(lambda: self.function(own, self.n_samples, rollout), sessions)
            trajectories = _trajectories(returned, prompt, group_id, scene, Responses(made, rollout.version))
            self.scene.outcomes.add(None, episodes=self.n_samples)
        except EpisodeError as error:
            self.scene.outcomes.add(error.cause, str(error), self.n_samples)
            trajectories = []
        self._count_unused(made, sessions, trajectories)
        return trajectories

    @contextmanager
    def _broken_off(self, made: Made) -> Iterator[None]:
        """Count what was generated for a group as cancelled where the run does not need it any more."""
        try:
            yield
        except asyncio.CancelledError:
            self.scene.pool.cancel([response for _, response in made])
            raise

    def _count_unused(self, made: Made, sessions: Sequence[Session], trajectories: Sequence[Trajectory]) -> None:
        """Count what was generated for a group and is in none of its trajectories."""
        orphaned = sum(session.tokens_orphaned for session in sessions)
        unused = sum(len(response.tokens) for _, response in made) - orphaned - generated_in(trajectories)
        self.scene.pool.set_aside("orphaned", orphaned)
        self.scene.pool.set_aside("unused", unused)

    async def _run(self, body: Callable[[], Any], sessions: Sequence[Session]) -> Any:
        """What a user's coroutine returns; raises EpisodeError where it fails, and what the servers failed of."""

        async def told() -> Any:
            try:
                return await body()
            except (asyncio.CancelledError, GeneratorExit):
                raise
            except BaseException as error:  # a user's code fails in any way it likes
                raise _Raised(error) from error

        try:
            return await self.scene.users.run(told, self.scene.timeout_s)
        except TimeLimit:
            limit = f"it took longer than {self.scene.timeout_s:g} s (episode.timeout_s)"
            raise EpisodeError("time limit", limit) from None
        except CancelledWithin:
            raise EpisodeError("raised", "CancelledError: it cancelled itself, or awaited what was cancelled") from None
        except _Raised as raised:
            cause = next((session.exceeded for session in sessions if session.exceeded), "")
            file = self.function.__code__.co_filename if hasattr(self.function, "__code__") else ""
            message = where_it_failed(raised.error, file)
            raise EpisodeError(f"limit of {cause}" if cause else "raised", message) from raised.error
        finally:
            for session in sessions:
                self.scene.outcomes.add_turns(session)
            failure = next((session.failure for session in sessions if session.failure), None)
            if failure is not None:
                raise failure

    def _session(
        self,
        group_id: int,
        number: int,
        prefills: Prefills | None,
        made: Made,
        main: asyncio.AbstractEventLoop | None = None,
    ) -> Session:
        """Session `number` on the server of its group, whose episodes share what they begin with; adds to `made`."""
        scene, home, requests = self.scene, main or asyncio.get_running_loop(), itertools.count()

        async def generate(tokens: Sequence[int], sampling: Sampling, seed: int | None) -> Response:
            if prefills and not session.turns:
                await prefills.of(tokens, sampling)
            response = await scene.pool.sample(tokens, sampling, seed=seed, priority=group_id, session=group_id)
            made.append((number, response))
            return response

        session = Session(
            scene.tokenizer,
            lambda tokens, sampling: in_loop(
                home, generate(tokens, sampling, self._request_seed(group_id, number, next(requests)))
            ),
            self.sampling,
            scene.limits,
            trained=self.trained,
        )
        if scene.parse_tools is not None:
            parse = scene.parse_tools
            session.parse_tools = lambda text, tools: in_loop(home, parse(text, tools))
        return session

    def _request_seed(self, *place: int) -> int | None:
        """A seed for the request of a session of a group: of one seed, equal prompts would have equal responses."""
        return None if self.seed is None else int(np.random.SeedSequence([self.seed, *place]).generate_state(1)[0])

    def _score(self, prompt: Prompt) -> Callable[[Sequence[Ints]], Awaitable[Sequence[Reward]]]:
        main = asyncio.get_running_loop()

        async def score(responses: Sequence[Ints]) -> Sequence[Reward]:
            return await in_loop(main, self.scene.score(prompt, responses))

        return score


class _Raised(Exception):
    """What a user's code raised, on its way through the thread."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _copied(value: Any) -> Any:
    """Lists and dicts of a row, which a workflow may append to: other episodes have the same row."""
    if isinstance(value, dict):
        return {name: _copied(part) for name, part in value.items()}
    return [_copied(part) for part in value] if isinstance(value, list) else value


def _reward(returned: Any) -> Reward:
    """What an episode returned, as a reward; raises EpisodeError."""
    if returned is None:
        return Reward(None)
    try:
        if isinstance(returned, Reward):  # as the run's own score gives them
            return Reward(_reward(returned.value).value, as_reward({**returned.parts, VALUE: 0}, "it").parts)
        return as_reward(returned, "it")
    except TypeError as error:
        raise EpisodeError("not a reward", f"the parts of a reward are a dict of numbers: {error}") from error
    except UserCodeError as error:
        raise EpisodeError("not a reward", f"{error}, nor None") from error


def _trajectories(
    returned: Any, prompt: Prompt, group_id: int, scene: EpisodeContext, responses: Responses
) -> list[Trajectory]:
    """What a group returned, numbered, with rewards that are numbers; raises EpisodeError."""
    if not isinstance(returned, list) or not all(isinstance(item, Trajectory) for item in returned):
        raise EpisodeError("not trajectories", f"it returned {str(returned)[:80]!r}, not a list of Trajectory")
    trajectories, max_tokens = [], scene.limits.max_tokens
    for number, given in enumerate(returned):
        worth, item = _reward(given.reward), _with_arrays(given, number, scene.vocab_size)
        if (size := len(item.tokens)) > max_tokens:
            problem = f"it returned a trajectory of {size} tokens, more than {max_tokens} (episode.max_tokens)"
            raise EpisodeError("limit of tokens", problem)
        if not item.generated.any():
            raise EpisodeError("nothing generated", f"nothing in trajectory {number} was generated")
        if item.generated[0]:  # no log-prob is known of it, and what follows would be trained on without its prompt
            problem = (
                f"trajectory {number} begins with a generated token, not with the prompt that it was generated for"
            )
            raise EpisodeError("not trajectories", problem)
        try:
            item, _ = responses.claim(item)
        except NotGenerated as problem:
            raise EpisodeError("not trajectories", f"trajectory {number}: {problem}") from problem
        parts = {**item.reward_parts, **worth.parts}
        own = replace(item, sample_id=prompt.sample_id, group_id=group_id, sample=number)
        trajectories.append(replace(own, reward=worth.value, reward_parts=parts))
    return trajectories


def _with_arrays(item: Trajectory, number: int, vocab_size: int | None) -> Trajectory:
    """A trajectory as a batch takes it, whoever made it; raises EpisodeError for values that none can be made of."""
    try:
        ids = np.asarray(item.tokens)
        tokens, versions = (np.asarray(each).astype(np.int32, casting="same_kind") for each in (ids, item.versions))
        logprobs = np.asarray(item.logprobs).astype(np.float32, casting="same_kind")
        ending = FinishReason(item.finish_reason)
        parts = {str(name): float(part) for name, part in dict(item.reward_parts).items()}
    except (
        TypeError,
        ValueError,
        OverflowError,
        RuntimeError,
    ) as error:  # the last is torch's, of what needs gradients
        raise EpisodeError("not trajectories", f"trajectory {number} is not one: {error}") from error
    shapes = tokens.shape, logprobs.shape, versions.shape
    if set(shapes) != {(tokens.size,)}:
        problem = "trajectory {} has tokens, logprobs and versions of shapes {}, {} and {}, not [tokens] each"
        raise EpisodeError("not trajectories", problem.format(number, *shapes))
    most = np.iinfo(np.int32).max if vocab_size is None else vocab_size
    if wrong := ids[(ids < 0) | (ids >= most)].tolist():
        problem = f"trajectory {number} has the token id {wrong[0]}, and the model knows 0 to {most - 1}"
        raise EpisodeError("not trajectories", problem)
    return replace(item, tokens=tokens, logprobs=logprobs, versions=versions, finish_reason=ending, reward_parts=parts)
