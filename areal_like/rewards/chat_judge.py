"""A language model behind OpenAI's chat completions whose answer contains the reward."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Self

from areal_like.core.config.schema import ChatJudgeConfig
from areal_like.core.errors import RunError
from areal_like.core.types import Prompt, Reward
from areal_like.rewards.judge_texts import fill, read_score
from areal_like.rewards.pool import Cause, Failure


class ScoreCache:
    """The last `size` scores, without failures. Texts are stored as digests, because they may be long."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._scores: OrderedDict[bytes, float] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[float | Failure]] = {}

    async def get(self, text: str, score: Callable[[str], Awaitable[float | Failure]]) -> tuple[float | Failure, bool]:
        """Return the score of a text, and whether it came from another request."""
        if not self._size:
            return await score(text), False
        key = sha256(text.encode("utf-8", "surrogatepass")).digest()
        if (known := self._scores.get(key)) is not None:
            self._scores.move_to_end(key)
            return known, True
        was_running = key in self._running
        if not was_running:
            self._running[key] = asyncio.create_task(self._run(key, text, score))
        # A caller that is cancelled leaves the request to the others that wait for it.
        return await asyncio.shield(self._running[key]), was_running

    async def close(self) -> None:
        """Cancel the pending requests."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _run(self, key: bytes, text: str, score: Callable[[str], Awaitable[float | Failure]]) -> float | Failure:
        try:
            outcome = await score(text)
        finally:
            del self._running[key]
        if not isinstance(outcome, Failure):
            self._scores[key] = outcome
            if len(self._scores) > self._size:
                self._scores.popitem(last=False)
        return outcome


_SHOWN = 200  # characters of an answer in a message
_COUNTS = ("judged", "cached", "failed")


@dataclass(frozen=True)
class JudgeServer:
    """An OpenAI-compatible server: its base URL `url`, the name of its model, and its access token."""

    url: str
    model: str
    token: str = ""

    @classmethod
    def from_config(cls, config: ChatJudgeConfig) -> JudgeServer:
        """Return a judge on a server that the run does not start."""
        token = os.environ.get(config.token_variable, "") if config.token_variable else ""
        return cls(str(config.url), str(config.model), token)


class ChatJudge(AbstractAsyncContextManager["ChatJudge"]):
    """Scores responses by asking a language model on `servers` in turn; a Judge (`rewards/scoring.py`).

    On entry, the judge scores `probe` with its reference answer as the response, so that a wrong URL, token, model or
    prompt ends the run before training starts.
    """

    def __init__(self, config: ChatJudgeConfig, probe: Prompt, servers: Sequence[JudgeServer]) -> None:
        self._config, self._probe, self._servers = config, probe, servers
        self._room = asyncio.Semaphore(config.requests)
        self._cache = ScoreCache(config.cache_size)
        self._counts: Counter[str] = Counter()
        self._clients: list[Any] = []
        self._turn = itertools.count()

    async def __aenter__(self) -> Self:
        """Raise RunError if the judge does not score the probe."""
        self._clients = await asyncio.to_thread(_make_clients, self._config, self._servers)
        outcome = await self._score(self._probe, self._probe.answer or "42")
        if isinstance(outcome, Failure):
            await self._close()
            where = "path" if self._config.url is None else "url"
            raise RunError(
                f"the judge at reward.judge.{where}={getattr(self._config, where)} did not score row "
                f"{self._probe.sample_id + 1}: {outcome.message}. The judge must score one response before the first "
                f"step. {_remedy(outcome.cause, where)}"
            )
        self._counts.clear()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._cache.close()
        await self._close()

    async def __call__(self, responses: Sequence[str], prompt: Prompt) -> list[Reward | Failure]:
        """Return a reward or a failure for each response."""
        return await asyncio.gather(*(self._score(prompt, response) for response in responses))

    def statistics(self) -> dict[str, float]:
        """Return how many responses were judged, scored from the cache, or failed since the last call."""
        counts = {f"judge/{name}": float(self._counts[name]) for name in _COUNTS}
        self._counts.clear()
        return counts

    async def _close(self) -> None:
        for client in self._clients:
            await client.close()

    async def _score(self, prompt: Prompt, response: str) -> Reward | Failure:
        text = fill(self._config.template, prompt, response)
        outcome, was_cached = await self._cache.get(text, self._judge)
        self._counts["failed" if isinstance(outcome, Failure) else "cached" if was_cached else "judged"] += 1
        return outcome if isinstance(outcome, Failure) else Reward(outcome)

    async def _judge(self, text: str) -> float | Failure:
        """Return the reward from one request. The time limit does not include the wait for a free slot."""
        from openai import APIConnectionError, APIStatusError, OpenAIError

        limit = self._config.timeout_s
        try:
            async with self._room, asyncio.timeout(limit):
                answer, was_cut_off = await self._ask(text)
        except TimeoutError:
            return Failure(Cause.TIMED_OUT, f"the judge took more than {limit:g} s")
        except APIStatusError as error:
            return Failure(
                Cause.RAISED, f"the judge answered with status {error.status_code}: {_shorten(error.message)}"
            )
        except APIConnectionError as error:
            return Failure(Cause.DIED, f"the judge cannot be reached: {error.__cause__ or error}")
        except (OpenAIError, ValueError, LookupError, AttributeError, TypeError) as error:  # not OpenAI's interface
            return Failure(Cause.UNREADABLE, f"the judge's answer is not a chat completion: {_shorten(repr(error))}")
        reward = read_score(self._config, answer)
        if reward is None:
            cut = ", which reward.judge.max_tokens cut off," if was_cut_off else ""
            return Failure(Cause.UNREADABLE, f"the judge's answer{cut} has no score in the range: {_shorten(answer)!r}")
        return reward

    async def _ask(self, text: str) -> tuple[str, bool]:
        """Return the judge's answer, and whether the token limit cut it off."""
        config, number = self._config, next(self._turn) % len(self._clients)
        optional = {"temperature": config.temperature, "max_tokens": config.max_tokens}
        completion = await self._clients[number].chat.completions.create(
            model=self._servers[number].model,
            messages=[{"role": "user", "content": text}],
            **{name: value for name, value in optional.items() if value is not None},
        )
        choice = completion.choices[0]
        return choice.message.content or "", choice.finish_reason == "length"


def _make_clients(config: ChatJudgeConfig, servers: Sequence[JudgeServer]) -> list[Any]:
    """Return the clients, which retry failed requests. Importing them takes a second, so call this in a thread."""
    from openai import AsyncOpenAI

    return [
        AsyncOpenAI(
            base_url=server.url,
            api_key=server.token or "none",  # the client requires a token
            max_retries=config.retries,
            timeout=2 * config.timeout_s,  # per request; the limit over all retries fires first
        )
        for server in servers
    ]


def _remedy(cause: Cause, where: str) -> str:
    if cause is Cause.UNREADABLE:
        return "Correct reward.judge.prompt, reward.judge.score_pattern or reward.judge.score_field."
    if cause is Cause.TIMED_OUT:
        return "Raise reward.judge.timeout_s, or lower reward.judge.max_tokens."
    if where == "path":
        return "Read the log of the judge's server, and lower reward.judge.max_tokens if the context is too short."
    return "Correct reward.judge.url, reward.judge.model or reward.judge.token_variable."


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
