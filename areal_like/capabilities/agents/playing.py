"""Calls in a worker process, which runs an episode or a group with the user's function.

`pack_call` packs a call in the main process; `player` runs it in a worker.
"""

import asyncio
import copy
import pickle
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_like.capabilities.agents.parameters import Provider, Report, parameters, takes
from areal_like.capabilities.agents.replies import Reply, error_reply
from areal_like.capabilities.agents.rewarded import EpisodeError, reward_of
from areal_like.capabilities.agents.workers.frames import Unanswered
from areal_like.capabilities.agents.workers.worker import Ask, AskNow, Handler, has_memory_limit
from areal_like.core.rollout.joining import Part, join_parts
from areal_like.core.rollout.sample import Response, Sampling
from areal_like.core.types import FinishReason, Ints, Prompt, Reward, Trajectory
from areal_like.core.user_code import Portable, UserCodeError, where_it_failed
from areal_like.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from openai import AsyncOpenAI


@dataclass(frozen=True, eq=False)
class Recorded:
    """A `client` and the trajectories of its requests; turns that continue each other are one trajectory."""

    client: "AsyncOpenAI"
    _ask_now: AskNow

    def trajectories(self, reward: float | Reward | None) -> list[Trajectory]:
        """Return the trajectories so far, all with this reward; None means a missing reward."""
        worth = reward if isinstance(reward, Reward) else Reward(reward)
        told = self._ask_now("trajectories", self.client.api_key.encode())
        found: list[Trajectory] = pickle.loads(told)  # noqa: S301  # of the main process
        return [replace(item, reward=worth.value, reward_parts=worth.parts) for item in found]


@dataclass(frozen=True, eq=False)
class Rollout:
    """The servers, the reward and the tokenizer of the run, for one group.

    `sampling` is the run's; `version` is the version of the servers' weights when the group started.
    """

    prompt: Prompt
    group_id: int
    tokenizer: Tokenizer
    sampling: Sampling
    version: int
    _ask: Ask
    _ask_now: AskNow
    _client: Callable[[str], "AsyncOpenAI"]
    _vocab_size: int | None = None  # of the model, if its files are on this host
    _given: Mapping[str, Any] = field(default_factory=dict)  # by the names of parameters

    async def score(self, responses: Sequence[Sequence[int] | Ints]) -> Sequence[Reward]:
        """Return the run's reward for responses to the prompt, which are token ids."""
        return await self._ask_pickled("score", [np.asarray(each, np.int32) for each in responses])

    async def sample(self, tokens: Sequence[int] | Ints, max_new_tokens: int | None = None) -> Response:
        """Generate one response to a prompt of token ids, at most as long as the run's (`gconfig.max_new_tokens`).

        Prompt and response have at most `episode.max_tokens`; a longer prompt fails the group. Requests of one group go
        to one server, which caches their shared prefixes. Raises ValueError for unknown tokens and for an empty prompt.
        """
        ids = np.asarray(tokens, np.int32)
        if not len(ids) or ids.min() < 0 or ids.max() >= (self._vocab_size or np.inf):
            known = f" and below {self._vocab_size}" if self._vocab_size else ""
            raise ValueError(f"a prompt needs at least one token id, each at least 0{known}, not {ids}")
        return await self._ask_pickled("sample", (ids, max_new_tokens))

    def trajectory(self, parts: Sequence[Part], reward: float | Reward | None) -> Trajectory:
        """Join generated parts (a Response) and other parts (token ids: prompts, tool output), in order.

        Only generated tokens are trained on. Raises ValueError if there are none.
        """
        kept = [part for part in parts if not isinstance(part, Response) or len(part.tokens)]
        if not any(isinstance(part, Response) for part in kept):
            raise ValueError("a trajectory needs at least one response of rollout.sample")
        return join_parts(self.prompt, self.group_id, kept, reward if isinstance(reward, Reward) else Reward(reward))

    def wrap_response(
        self, prompt: Sequence[int], response: Sequence[int], reward: float | Reward | None
    ) -> Trajectory:
        """Return a response of the dataset as a trajectory, for `algorithm: sft` and `dpo`; both are token ids.

        It is trained on as if the current weights had generated it. Its log-probs are unknown (nan), so a loss that
        reads them is nan, too. Raises ValueError for an empty response.
        """
        tokens = np.array([*prompt, *response], np.int32)
        known = Response(tokens[len(prompt) :], np.full(len(response), np.nan, np.float32))
        known.versions = np.full(len(response), self.version, np.int32)
        known.finish_reason = FinishReason.STOP
        return self.trajectory([tokens[: len(prompt)], known], reward)

    given = wrap_response  # its name before

    def __getattr__(self, name: str) -> Any:
        """Return an object of a capability for groups, such as `sandbox`; raise ValueError if the run lacks it."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._given:
            return self._given[name]
        missing = next((each.missing for each in parameters() if each.name == name), None)
        raise AttributeError(f"a rollout has no {name}") if missing is None else ValueError(missing)

    @asynccontextmanager
    async def record(self) -> AsyncIterator[Recorded]:
        """Open a recording `openai.AsyncOpenAI` client on the run's servers, with limits of its own."""
        key = (await self._ask("record", b"")).decode()
        yield Recorded(self._client(key), self._ask_now)

    recorded = record  # its name before

    async def _ask_pickled(self, method: str, question: Any) -> Any:
        return pickle.loads(await self._ask(method, pickle.dumps(question)))  # noqa: S301  # of the main process


NOWHERE = "http://areal-like.invalid/v1"  # a name that never resolves (RFC 2606)

type Answer = Callable[[str, str, Mapping[str, str], bytes], Awaitable[Reply]]
"""Answer an HTTP request: method, path, headers in lower case, body."""


class Clients:
    """A factory of clients. `base_url` is the URL for other processes, if there is one.

    Creating an OpenAI client takes as long as a request, and so does an HTTP client's handling of redirects and
    cookies. All clients are copies of one without these.
    """

    def __init__(self, answer: Answer, base_url: str | None = None) -> None:
        import httpx
        from openai import AsyncOpenAI

        class Answered(httpx.AsyncClient):
            async def send(self, request: httpx.Request, **_: Any) -> httpx.Response:
                body = await request.aread()
                reply = await answer(request.method, request.url.path, request.headers, body)
                headers = {"Content-Type": reply.content_type}
                return httpx.Response(reply.status, headers=headers, content=reply.content, request=request)

        http = Answered(trust_env=False)
        self._original = AsyncOpenAI(api_key="none", base_url=base_url or NOWHERE, http_client=http, max_retries=0)

    async def warm_up(self) -> None:
        """Send one request without an answer, because a client detects its platform on its first request."""
        from openai import APIError

        try:
            await self._original.get("/models", cast_to=object)
        except APIError:
            return

    def with_key(self, key: str) -> "AsyncOpenAI":
        """Return a client with this API key."""
        client = copy.copy(self._original)
        client.api_key = key
        return client


ENTRY = f"{__name__}:player"


@dataclass(frozen=True)
class Episode:
    """A call of `run(row, client)`; `key` is the session's, `base_url` is the URL for other processes."""

    function: Portable
    row: Mapping[str, Any]
    key: str
    base_url: str | None
    recipes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlayedGroup:
    """A call of `run(prompt, n, rollout)`; `tokenizer` names the run's, which each worker receives once."""

    function: Portable
    prompt: Prompt
    n: int
    group_id: int
    tokenizer: int
    sampling: Sampling
    version: int
    vocab_size: int | None
    base_url: str | None
    recipes: Mapping[str, Any] = field(default_factory=dict)


def pack_call(request: Episode | PlayedGroup) -> bytes:
    """Return a call as bytes; instances of user classes in a row are sent by value."""
    try:
        return pickle.dumps(request)
    except (pickle.PicklingError, TypeError, AttributeError):
        import cloudpickle

        return cloudpickle.dumps(request)


def player(functions: bytes) -> Handler:
    """Return the handler of calls in this process, with these functions loaded; see `WorkerSettings.entry`."""
    from openai.resources.chat import AsyncCompletions  # otherwise a client's first request imports them, for a second
    from openai.types.chat import ChatCompletion

    _ = AsyncCompletions, ChatCompletion
    playing = _Player()
    asyncio.run(playing.clients(None).warm_up())
    for function in pickle.loads(functions):  # noqa: S301  # of the main process
        with suppress(UserCodeError):  # each call of the function reports it
            function.load()
    return playing


class _Player:
    """A handler of calls, with their shared clients and tokenizer."""

    def __init__(self) -> None:
        self._loading = threading.Lock()
        self._asks: dict[str, Ask] = {}
        self._clients: dict[str | None, Clients] = {}
        self._tokenizers: dict[int, Tokenizer] = {}
        self._providers: Mapping[str, Provider] = {each.name: each.provider() for each in parameters()}

    async def __call__(self, body: bytes, ask: Ask, ask_now: AskNow) -> bytes:
        """Return the outcome of a call, or the cause and message of a failure; see Handler."""
        file = ""
        try:
            request: Episode | PlayedGroup = pickle.loads(body)  # noqa: S301  # of the main process
            with self._loading:  # otherwise two loops would run its module twice
                function = request.function.load()
            file = getattr(getattr(function, "__code__", None), "co_filename", "")
            play = self._group if isinstance(request, PlayedGroup) else self._episode
            return pickle.dumps((True, await play(function, request, ask, ask_now)))  # type: ignore[arg-type]
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except EpisodeError as error:
            return pickle.dumps((False, error.cause, str(error)))
        except tuple(each.error for each in parameters()) as error:
            cause = next(each.cause for each in parameters() if isinstance(error, each.error))
            return pickle.dumps((False, cause, str(error)))
        except MemoryError as error:
            cause, limit = (
                ("memory", "more memory than episode.memory_mb allows: ") if has_memory_limit() else ("raised", "")
            )
            return pickle.dumps((False, cause, limit + where_it_failed(error, file)))
        except BaseException as error:  # noqa: BLE001 - user code may raise anything
            return pickle.dumps((False, "raised", where_it_failed(error, file)))

    def clients(self, base_url: str | None) -> Clients:
        """Return clients whose requests go to the main process."""
        if base_url not in self._clients:
            self._clients[base_url] = Clients(self._answer, base_url)
        return self._clients[base_url]

    async def _episode(self, function: Any, request: Episode, ask: Ask, _: AskNow) -> Any:
        self._asks[request.key] = ask
        client = self.clients(request.base_url).with_key(request.key)
        try:
            async with AsyncExitStack() as entered:
                given = {
                    name: await entered.enter_async_context(self._providers[name].open(recipe, _reporting(name, ask)))
                    for name, recipe in request.recipes.items()
                    if takes(function, name)
                }
                return reward_of(await function(dict(request.row), client, **given))
        finally:
            del self._asks[request.key]

    async def _group(self, function: Any, request: PlayedGroup, ask: Ask, ask_now: AskNow) -> Any:
        if request.tokenizer not in self._tokenizers:
            self._tokenizers[request.tokenizer] = pickle.loads(await ask("tokenizer", b""))  # noqa: S301
        tokenizer = self._tokenizers[request.tokenizer]
        keys = list[str]()

        def client(key: str) -> Any:
            self._asks[key] = ask
            keys.append(key)
            return self.clients(request.base_url).with_key(key)

        prompt = replace(request.prompt, tokens=list(request.prompt.tokens), row=dict(request.prompt.row))
        about = (request.group_id, tokenizer, request.sampling, request.version)
        given = {
            name: self._providers[name].for_group(recipe, _reporting(name, ask))
            for name, recipe in request.recipes.items()
        }
        rollout = Rollout(prompt, *about, ask, ask_now, client, request.vocab_size, given)
        try:
            return _plain(await function(prompt, request.n, rollout))
        finally:
            for key in keys:
                del self._asks[key]

    async def _answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        key = headers.get("authorization", "").removeprefix("Bearer ")
        if (ask := self._asks.get(key)) is None:
            return error_reply(401, "the API key does not belong to a running episode")
        try:
            return Reply(*pickle.loads(await ask("http", pickle.dumps((method, path, dict(headers), body)))))  # noqa: S301
        except Unanswered as error:
            return error_reply(500, str(error))


def _reporting(parameter: str, ask: Ask) -> Report:
    async def report(counts: Mapping[str, float]) -> None:
        with suppress(Unanswered):  # the episode was cancelled
            await ask("counts", pickle.dumps((parameter, dict(counts))))

    return report


def _plain(returned: Any) -> list[Trajectory]:
    """Return the trajectories of a group as arrays; raise EpisodeError for anything else."""
    if not isinstance(returned, list) or not all(isinstance(item, Trajectory) for item in returned):
        raise EpisodeError("not trajectories", f"it returned {str(returned)[:80]!r}, not a list of trajectories")
    return [_arrays(number, item) for number, item in enumerate(returned)]


def _arrays(number: int, item: Trajectory) -> Trajectory:
    worth = reward_of(item.reward)
    if worth.turns or worth.states:
        raise EpisodeError(
            "not a reward", f"trajectory {number} has rewards or states of turns, which only an episode can have"
        )
    try:
        tokens, logprobs, versions = map(np.asarray, (item.tokens, item.logprobs, item.versions))
        parts = {str(name): float(part) for name, part in {**dict(item.reward_parts), **worth.parts}.items()}
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # torch raises the last
        raise EpisodeError("not trajectories", f"trajectory {number} is invalid: {error}") from error
    ending = str(item.finish_reason)
    return Trajectory(0, 0, tokens, logprobs, versions, ending, worth.value, parts)  # type: ignore[arg-type]
