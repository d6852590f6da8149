"""Workflows written by users: `async def run(row, client)` for each episode, or `run(prompt, n, rollout)` for a group.

A failed episode returns trajectories without a reward, or none. It is counted by its cause and never ends the run; the
run ends only if more than `episode.max_failed_share` of a batch fails. See docs/workflows.md.
"""

import asyncio
import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from areal_like.capabilities.agents.openai_api import OpenSessions
from areal_like.capabilities.agents.outcomes import Outcomes
from areal_like.capabilities.agents.playing import Episode, PlayedGroup, pack_call
from areal_like.capabilities.agents.prefills import Prefills
from areal_like.capabilities.agents.provenance import Generated, NotGenerated, Responses
from areal_like.capabilities.agents.rewarded import STATES, TURNS, EpisodeError, reward_of
from areal_like.capabilities.agents.schema import BranchConfig
from areal_like.capabilities.agents.session import Limits, ParseTools, Session
from areal_like.capabilities.agents.shared_turns import Shared, SharedTurns
from areal_like.capabilities.agents.turn import Turn
from areal_like.capabilities.agents.workers.frames import NotPlain, plain
from areal_like.capabilities.agents.workers.processes import CancelledWithin, TimeLimit, UserProcesses, in_loop
from areal_like.capabilities.agents.workers.remote import CallStart, EndedWorker
from areal_like.core.rollout.pool import Response, Sampling, ServerPool
from areal_like.core.rollout.sample import OnTokens
from areal_like.core.types import FinishReason, Prompt, Reward, Score, Trajectory, generated_in
from areal_like.core.user_code import Portable
from areal_like.data.tokenizer import Tokenizer

LIMITS = frozenset({"time limit", "limit of turns", "limit of tokens"})  # causes of truncated episodes


@dataclass(frozen=True)
class EpisodeContext:
    """Parts shared by the episodes of a run."""

    pool: ServerPool
    tokenizer: Tokenizer
    score: Score
    processes: UserProcesses | None  # None without a user's workflow
    outcomes: Outcomes
    limits: Limits
    timeout_s: float
    parse_tools: ParseTools | None
    prefill_once: bool
    vocab_size: int | None = None  # of the model, if its files are on this host
    grades: bool = False  # whether an episode that reaches a limit is scored like a response
    call_starts: Sequence[str] | None = None  # texts that tool calls begin with, if known
    recipes: Mapping[str, Any] = field(default_factory=dict)  # of the functions' parameters
    sessions: OpenSessions = field(default_factory=OpenSessions)
    base_url: str | None = None  # URL for other processes, if there is one
    number: int = field(default_factory=itertools.count().__next__)


@dataclass(frozen=True)
class UserWorkflow:
    """The workflow of a user's function; `per_group` is its form.

    With `trained` false, as in evaluation, requests may name any temperature; `sampling` is used regardless.
    """

    function: Portable
    per_group: bool
    context: EpisodeContext
    sampling: Sampling
    n_samples: int
    seed: int | None = None
    trained: bool = True
    branch: BranchConfig | None = None  # branching points of episodes that share their first turns

    async def __call__(self, prompt: Prompt, group_id: int) -> list[Trajectory]:
        group = _Group(self, prompt, group_id)
        with group.broken_off():
            if self.branch is not None:
                episodes = [await group.play_branches(self.branch)]
            else:
                played = [group.play()] if self.per_group else map(group.play_episode, range(self.n_samples))
                episodes = await asyncio.gather(*played)
        trajectories = [trajectory for episode in episodes for trajectory in episode]
        group.count_unused(trajectories)
        return trajectories


class _Group:
    """A group during its episodes: its sessions, and the answers to the workers that run it.

    If another episode's code ends a worker, the next attempt discards the data of the interrupted one.
    """

    def __init__(self, workflow: UserWorkflow, prompt: Prompt, group_id: int) -> None:
        self._workflow, self._context, self._prompt, self._id = workflow, workflow.context, prompt, group_id
        self._home = asyncio.get_running_loop()
        self._made: list[Generated] = []
        self._orphaned = 0  # tokens of answers that no client has read
        self._shared: SharedTurns | None = None  # if episodes share their first turns
        # seeded samples must not depend on the content of the cache
        once = self._context.prefill_once and workflow.seed is None
        self._prefills = Prefills(self._context.pool, group_id) if once else None

    @contextmanager
    def broken_off(self) -> Iterator[None]:
        """Count a group's tokens as cancelled if the run does not need the group any more."""
        try:
            yield
        except asyncio.CancelledError:
            self._context.pool.cancel([each.response for each in self._made])
            raise
        finally:
            self._context.pool.end_session(self._id)

    def count_unused(self, trajectories: Sequence[Trajectory]) -> None:
        """Count tokens generated for the group that are in none of its trajectories."""
        unused = sum(len(each.response.tokens) for each in self._made) - self._orphaned - generated_in(trajectories)
        self._context.pool.set_aside("orphaned", self._orphaned)
        self._context.pool.set_aside("unused", unused)

    async def play_episode(self, number: int) -> list[Trajectory]:
        """Play episode `number` and return its trajectories."""
        return self._join(number, *await self._play_episode(number))

    async def play_branches(self, branch: BranchConfig) -> list[Trajectory]:
        """Play all episodes, which share their first turns, and return their trajectories."""
        self._shared = shared = SharedTurns(branch, self._home)

        async def play(number: int) -> tuple[int, Sequence[Session], Reward] | None:
            failed, begins_with = False, await shared.wait(number)
            try:
                if begins_with is None:
                    return None
                sessions, reward = await self._play_episode(number, begins_with)
                failed = reward.value is None
                return number, sessions, reward
            finally:
                shared.end(number, failed=failed)

        episodes = await asyncio.gather(*map(play, range(self._workflow.n_samples)))
        played = [each for each in episodes if each is not None]
        numbers: dict[Turn, int] = {}  # shared turns are trained in the first episode with a reward
        trajectories: list[Trajectory] = []
        for number, sessions, reward in sorted(played, key=lambda each: each[2].value is None):
            trajectories += self._join(number, sessions, reward, numbers)
            await asyncio.sleep(0)
        return trajectories

    def _join(
        self, number: int, sessions: Sequence[Session], reward: Reward, numbers: dict[Turn, int] | None = None
    ) -> list[Trajectory]:
        of_sessions = (session.trajectories(self._prompt, self._id, reward, numbers) for session in sessions)
        return [replace(item, sample=number) for items in of_sessions for item in items]

    async def _play_episode(self, number: int, begins_with: Shared = ()) -> tuple[Sequence[Session], Reward]:
        """Return the sessions and the reward of an episode, which starts with another episode's turns."""
        context, sessions, reward = self._context, list[Session](), Reward(None)
        with ExitStack() as keys:

            def begin() -> CallStart:
                keys.close()
                self._forget(number)
                sessions[:] = [self._session(number)]
                if self._shared is not None:
                    sessions[0].shared = max(begins_with, self._shared.given_by(number), key=len)
                    self._shared.watch(number, sessions[0])
                key = keys.enter_context(context.sessions.open(sessions[0]))
                row, served = dict(self._prompt.row), (context.base_url, context.recipes)
                return CallStart(pack_call(Episode(self._workflow.function, row, key, *served)), self._answer)

            try:
                reward = await self._run(begin, sessions)
                if not sessions[0].read:
                    raise EpisodeError("nothing generated", "it returned a reward without receiving a completion")
                _check_turns(reward, len(sessions[0].read))
                context.outcomes.add(None)
            except EpisodeError as error:
                reward = await self._grade(error, sessions)
        return sessions, reward

    async def _grade(self, error: EpisodeError, sessions: Sequence[Session]) -> Reward:
        """Return the reward of a failed episode: its last answer's if it reached a limit, else a missing one."""
        context, read = self._context, [turn for session in sessions for turn in session.read]
        if not (context.grades and read and error.cause in LIMITS):
            context.outcomes.add(error.cause, str(error))
            return Reward(None)
        (reward,) = await context.score(self._prompt, [read[-1].response.tokens])
        context.outcomes.add_graded(error.cause)
        return reward

    async def play(self) -> list[Trajectory]:
        """Play a workflow of the whole group and return its trajectories."""
        context, n, sessions = self._context, self._workflow.n_samples, list[Session]()
        version = context.pool.version
        with ExitStack() as keys:

            def begin() -> CallStart:
                keys.close()
                self._forget()
                sessions.clear()
                function, sampling = self._workflow.function, self._workflow.sampling
                prompt = replace(self._prompt, row=dict(self._prompt.row))
                about = (n, self._id, context.number, sampling, version, context.vocab_size)
                served = (context.base_url, context.recipes)
                return CallStart(
                    pack_call(PlayedGroup(function, prompt, *about, *served)), _Answers(self, sessions, keys)
                )

            try:
                returned = await self._run(begin, sessions)
                responses = Responses(self._made, version)
                trajectories = _trajectories(returned, self._prompt, self._id, context, responses)
                context.outcomes.add(None, episodes=n)
                return trajectories
            except EpisodeError as error:
                context.outcomes.add(error.cause, str(error), n)
                return []

    async def _run(self, begin: Callable[[], CallStart], sessions: Sequence[Session]) -> Any:
        """Return the result of a user's coroutine; raise EpisodeError if it fails, or the servers' failure."""
        context = self._context
        assert context.processes is not None  # for the type checker: a user's workflow has processes
        try:
            worked, *outcome = await context.processes.call(begin, context.timeout_s)
        except TimeLimit:
            limit = f"it took longer than {context.timeout_s:g} s (episode.timeout_s)"
            raise EpisodeError("time limit", limit) from None
        except CancelledWithin:
            raise EpisodeError("raised", "CancelledError: it cancelled itself or awaited a cancelled task") from None
        except EndedWorker as ended:
            raise EpisodeError(ended.cause, str(ended)) from None
        except NotPlain as error:
            raise EpisodeError("not trajectories", f"it returned an unsupported value: {error}") from error
        finally:
            for session in sessions:
                context.outcomes.add_turns(session)
                self._orphaned += session.tokens_orphaned
            failure = next((session.failure for session in sessions if session.failure), None)
            if failure is not None:
                raise failure
        if worked:
            return outcome[0]
        cause, message = outcome
        exceeded = next((session.exceeded for session in sessions if session.exceeded), "")
        raise EpisodeError(f"limit of {exceeded}" if exceeded and cause == "raised" else cause, message)

    def _forget(self, number: int | None = None) -> None:
        """Count the tokens of an earlier attempt as cancelled."""
        shared = () if self._shared is None or number is None else self._shared.given_by(number)
        kept = [turn.tokens for _, turn in shared]  # with which other episodes have started
        forgotten = [
            each for each in self._made if number in (None, each.session) and not any(map(each.begins_with, kept))
        ]
        old = [each.response for each in forgotten]
        self._made[:] = [each for each in self._made if each not in forgotten]
        if old:
            self._home.call_soon_threadsafe(self._context.pool.cancel, old)

    async def _answer(self, method: str, question: bytes) -> bytes:
        """Answer a worker's question: a client's request, or counts of a parameter."""
        if method == "counts":
            self._home.call_soon_threadsafe(self._context.outcomes.add_counts, *plain(question))
            return b""
        reply = await self._context.sessions.answer(*plain(question))
        return pickle.dumps((reply.status, reply.content, reply.content_type))

    def _session(self, number: int) -> Session:
        """Return session `number` on its group's server, because the group's episodes share their start."""
        context, workflow, home, requests = self._context, self._workflow, self._home, itertools.count()
        turns = list[Turn]()  # a closure over the session itself would be a cycle

        async def generate(
            tokens: Sequence[int],
            sampling: Sampling,
            seed: int | None,
            inputs_from: int,
            on_tokens: OnTokens | None,
            images: tuple[bytes, ...],
        ) -> Response:
            if self._prefills and not turns:
                await self._prefills.cache(tokens, sampling, images)
            response = await context.pool.sample(
                tokens,
                sampling,
                seed=seed,
                priority=self._id,
                session=self._id,
                inputs_from=inputs_from,
                on_tokens=on_tokens,
                images=images,
            )
            self._made.append(Generated(number, np.asarray(tokens, np.int32), response))
            return response

        session = Session(
            context.tokenizer,
            lambda tokens, sampling, *, inputs_from, on_tokens, images: in_loop(
                home, generate(tokens, sampling, self._seed(number, next(requests)), inputs_from, on_tokens, images)
            ),
            workflow.sampling,
            context.limits,
            trained=workflow.trained,
            turns=turns,
        )
        if context.parse_tools is not None:
            parse = context.parse_tools
            session.parse_tools = lambda text, tools: in_loop(home, parse(text, tools))
            session.call_starts = context.call_starts
        return session

    def _seed(self, number: int, request: int) -> int | None:
        """Return a seed for each request: with one seed, equal prompts would have equal responses."""
        if self._workflow.seed is None:
            return None
        return int(np.random.SeedSequence([self._workflow.seed, self._id, number, request]).generate_state(1)[0])


class _Answers:
    """The answers to a group's `rollout` in one attempt; opens sessions and their keys as needed."""

    def __init__(self, group: _Group, sessions: list[Session], keys: ExitStack) -> None:
        self._group, self._sessions, self._keys = group, sessions, keys
        self._by_key: dict[str, Session] = {}

    async def __call__(self, method: str, question: bytes) -> bytes:
        if method in ("http", "counts"):
            return await self._group._answer(method, question)
        return await getattr(self, f"_{method}")(question)

    async def _tokenizer(self, _: bytes) -> bytes:
        return pickle.dumps(self._group._context.tokenizer)

    async def _sample(self, question: bytes) -> bytes:
        tokens, most = plain(question)
        prompt = self._group._prompt
        shown = prompt.images if list(tokens[: len(prompt.tokens)]) == list(prompt.tokens) else ()
        response = await self._open().generate(tokens, most, images=shown)
        return pickle.dumps(replace(response, columns={}, inputs={}))

    async def _score(self, question: bytes) -> bytes:
        group = self._group
        return pickle.dumps(await in_loop(group._home, group._context.score(group._prompt, plain(question))))

    async def _record(self, _: bytes) -> bytes:
        session = self._open()
        key = self._keys.enter_context(self._group._context.sessions.open(session))
        self._by_key[key] = session
        return key.encode()

    async def _trajectories(self, question: bytes) -> bytes:
        session = self._by_key[question.decode()]
        found = session.trajectories(self._group._prompt, self._group._id, Reward(None))
        return pickle.dumps([replace(item, columns={}, nodes=()) for item in found])  # see Responses.claim

    def _open(self) -> Session:
        self._sessions.append(self._group._session(len(self._sessions)))
        return self._sessions[-1]


def _check_turns(reward: Reward, answers: int) -> None:
    """Raise EpisodeError if rewards or states of turns do not match the answers."""
    for key, what, given in ((TURNS, "rewards", reward.turns), (STATES, "states", reward.states)):
        if given and len(given) != answers:
            raise EpisodeError("not a reward", f"it returned {len(given)} {what} under '{key}' for {answers} answers")


def _trajectories(
    returned: Any, prompt: Prompt, group_id: int, context: EpisodeContext, responses: Responses
) -> list[Trajectory]:
    """Return the trajectories of a group with numeric rewards; raise EpisodeError.

    The trajectories of one recorded client are one sample, like the trajectories of an episode.
    """
    trajectories, max_tokens = [], context.limits.max_tokens
    samples: dict[Any, int] = {}
    for number, given in enumerate(returned):
        worth, item = reward_of(given.reward), _with_arrays(given, number, context.vocab_size)
        if (size := len(item.tokens)) > max_tokens:
            problem = f"it returned a trajectory of {size} tokens, more than {max_tokens} (episode.max_tokens)"
            raise EpisodeError("limit of tokens", problem)
        if not item.generated.any():
            raise EpisodeError("nothing generated", f"trajectory {number} has no generated token")
        if item.generated[0]:  # its log-prob is unknown, and later tokens would be trained without their prompt
            problem = (
                f"trajectory {number} begins with a generated token, not with the prompt that it was generated for"
            )
            raise EpisodeError("not trajectories", problem)
        try:
            item, session = responses.claim(item)
        except NotGenerated as problem:
            raise EpisodeError("not trajectories", f"trajectory {number}: {problem}") from problem
        parts = {**item.reward_parts, **worth.parts}
        sample = samples.setdefault(("data", number) if session is None else session, len(samples))
        own = replace(item, sample_id=prompt.sample_id, group_id=group_id, sample=sample)
        trajectories.append(replace(own, reward=worth.value, reward_parts=parts))
    return trajectories


def _with_arrays(item: Trajectory, number: int, vocab_size: int | None) -> Trajectory:
    """Return a trajectory with arrays, as a batch needs it; raise EpisodeError for unusable values."""
    try:
        ids = np.asarray(item.tokens)
        tokens, versions = (np.asarray(each).astype(np.int32, casting="same_kind") for each in (ids, item.versions))
        logprobs = np.asarray(item.logprobs).astype(np.float32, casting="same_kind")
        ending = FinishReason(item.finish_reason)
        parts = {str(name): float(part) for name, part in dict(item.reward_parts).items()}
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        # torch raises the last for tensors that need gradients
        raise EpisodeError("not trajectories", f"trajectory {number} is invalid: {error}") from error
    item = replace(item, nodes=())
    shapes = tokens.shape, logprobs.shape, versions.shape
    if set(shapes) != {(tokens.size,)}:
        problem = "trajectory {} has tokens, logprobs and versions of shapes {}, {} and {}, not [tokens] each"
        raise EpisodeError("not trajectories", problem.format(number, *shapes))
    most = np.iinfo(np.int32).max if vocab_size is None else vocab_size
    if wrong := ids[(ids < 0) | (ids >= most)].tolist():
        problem = f"trajectory {number} has the token id {wrong[0]}; the model has ids 0 to {most - 1}"
        raise EpisodeError("not trajectories", problem)
    return replace(item, tokens=tokens, logprobs=logprobs, versions=versions, finish_reason=ending, reward_parts=parts)
