"""Calls in a worker process, which runs an episode or a group with the user's function.

`pack_call` packs a call in the main process; `player` runs it in a worker.
"""

import asyncio
import pickle
import threading
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from areal_like.capabilities.agents.client import Clients
from areal_like.capabilities.agents.group import Rollout
from areal_like.capabilities.agents.parameters import Provider, Report, parameters, takes
from areal_like.capabilities.agents.replies import Reply, error_reply
from areal_like.capabilities.agents.rewarded import EpisodeError, reward_of
from areal_like.capabilities.agents.workers.frames import Unanswered
from areal_like.capabilities.agents.workers.worker import Ask, AskNow, Handler, has_memory_limit
from areal_like.data.tokenizer import Tokenizer
from areal_like.rollout.sample import Sampling
from areal_like.runtime.user_code import Portable, UserCodeError, where_it_failed
from areal_like.types import Prompt, Trajectory

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
        except _errors() as error:
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


def _errors() -> tuple[type[Exception], ...]:
    return tuple(each.error for each in parameters())


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
