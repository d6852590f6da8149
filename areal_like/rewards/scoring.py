"""Scoring of responses by the section `reward` of the configuration: one judge, or a weighted sum of several."""

import asyncio
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import numpy as np

from areal_like.core.config.schema import JudgeConfig, RewardConfig
from areal_like.core.types import Ints, Prompt, Reward
from areal_like.core.user_code import Portable
from areal_like.data.tokenizer import Tokenizer
from areal_like.rewards import functions, worker
from areal_like.rewards import texts as texts_of
from areal_like.rewards.chat_judge import ChatJudge
from areal_like.rewards.pool import Failure, RewardPool
from areal_like.rewards.verifiers import REWARDS, Verifier

# A group of at most this many tokens is decoded and checked on the event loop, in 1.5 ms. A round trip to a worker
# takes as long, and longer if all workers are busy. A group of 16 x 32k tokens takes 0.2 to 0.4 s, which would stall
# the rest of the run.
SHORT_TOKENS = 2048
_CHARACTERS = 4  # per token

type Judge = Callable[[Sequence[str], Prompt], Awaitable[list[Reward | Failure]]]


class Rewards(AbstractAsyncContextManager["Rewards"]):
    """Judges the responses of a run, in a `RewardPool` of its own that ends with the context.

    `model` is the judge of `type: model` and `chat` the judge of `type: judge`, if configured. The output and
    tracebacks of judges go to `log`; `say` receives the first failure of each cause.
    """

    def __init__(
        self,
        config: RewardConfig,
        tokenizer: Tokenizer,
        *,
        model: Judge | None = None,
        chat: ChatJudge | None = None,
        log: Path | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._tokenizer, self._say, self._log = tokenizer, say, log
        self._chat, self._served = chat, {"model": model, "judge": chat}
        file = tokenizer.directory and tokenizer.directory / "tokenizer.json"
        self._source = str(file) if file else tokenizer.backend.to_str()
        judged: Mapping[str, JudgeConfig] = config.parts or {"": config}
        types = [part.type for part in judged.values() if part.function is None and part.type in REWARDS]
        self._calls = bool(types) or any(part.function for part in judged.values())
        self._pool = RewardPool(
            timeout_s=config.timeout_s,
            workers=config.workers,
            memory_mb=config.memory_mb,
            prepare=(texts_of.__name__, texts_of.decoder.__name__, self._source),
            preload=[REWARDS[name].preload for name in dict.fromkeys(types)],
            log=log,
        )
        self._judges = {name: self._judge(part) for name, part in judged.items()}
        self._special = {name: part.special_tokens for name, part in judged.items()}
        self._weights = {name: part.weight for name, part in config.parts.items()}
        self._missing: Counter[str] = Counter()

    async def score(self, prompt: Prompt, responses: Sequence[Ints]) -> list[Reward]:
        """Return a reward for each response to a prompt, all of one group; missing if a judge failed. See Score."""
        decoded: dict[bool, Sequence[str]] = {}
        for special in {False, *self._special.values()}:
            texts = await self._decode(responses, special)
            if isinstance(texts, Failure):
                return [self._reward({"": texts}) for _ in responses]
            decoded[special] = texts
        return await self._score(prompt, decoded)

    async def score_texts(self, prompt: Prompt, texts: Sequence[str]) -> list[Reward]:
        """Score as `score` does, for responses that are text already."""
        return await self._score(prompt, {False: texts, True: texts})

    async def _decode(self, responses: Sequence[Ints], special: bool) -> Sequence[str] | Failure:
        """Return the texts of responses, with their special tokens if `special` is set."""
        if sum(map(len, responses)) <= SHORT_TOKENS:
            return [self._tokenizer.decode(response.tolist(), special=special) for response in responses]
        ids = [np.asarray(response, np.int32).tobytes() for response in responses]
        texts: Sequence[str] | Failure = await self._pool.call(
            functools.partial(texts_of.decoder, self._source), ids, special
        )
        return texts

    async def _score(self, prompt: Prompt, texts: Mapping[bool, Sequence[str]]) -> list[Reward]:
        calls = (judge(texts[self._special[name]], prompt) for name, judge in self._judges.items())
        outcomes = await asyncio.gather(*calls)
        return [self._reward(dict(zip(self._judges, of_one, strict=True))) for of_one in zip(*outcomes, strict=True)]

    def statistics(self) -> dict[str, float]:
        """Return the statistics since the last call: waits for a worker in seconds, and missing rewards by cause.

        A cause that occurred earlier only is 0.
        """
        mean, longest = self._pool.queue_seconds()
        missing = {f"reward_missing/{cause}": float(count) for cause, count in self._missing.items()}
        self._missing = Counter(dict.fromkeys(self._missing, 0))
        judged = self._chat.statistics() if self._chat else {}
        return {"queue_seconds_mean": mean, "queue_seconds_max": longest} | missing | judged

    def queue_seconds_mean(self) -> float:
        """Return the mean wait for a worker since the last call of `statistics`."""
        return self._pool.queue_seconds(keep=True)[0]

    def begin(self) -> None:
        """Start the pool, whose imports take a second, if a judge uses it. Otherwise the first call starts it."""
        if self._calls:
            self._pool.begin()

    async def __aexit__(self, *_: object) -> None:
        await self._pool.__aexit__()

    def _reward(self, outcomes: Mapping[str, Reward | Failure]) -> Reward:
        """Return one response's reward: the weighted sum of its parts, missing if one of them is."""
        rewards: dict[str, Reward] = {}
        for name, outcome in outcomes.items():
            if isinstance(outcome, Failure):
                self._note(outcome, name)
                return Reward(None)
            rewards[name] = outcome
        return rewards[""] if not self._weights else weighted_sum(rewards, self._weights)

    def _note(self, failure: Failure, part: str) -> None:
        if failure.cause not in self._missing:
            where = f"reward.parts.{part}" if part else "reward"
            more = f"; tracebacks: {self._log}" if self._log else ""
            self._say(
                f"a reward is missing ({where}): {failure.message}; further failures of this kind are only counted{more}"
            )
        self._missing[failure.cause] += 1

    def _judge(self, config: JudgeConfig) -> Judge:
        if config.function is not None:
            return _OfFunction(self._pool, Portable.pack(config.function))
        if config.type in self._served:
            judge = self._served[config.type]
            assert judge is not None, "its section is set"  # for the type checker; preflight has seen to it
            return judge
        return functools.partial(_verify, self._pool, REWARDS[config.type])


def weighted_sum(rewards: Mapping[str, Reward], weights: Mapping[str, float]) -> Reward:
    """Return the sum of named rewards; its parts are their values by name, and their own parts by `name.part`."""
    values = {name: float(reward.value or 0.0) for name, reward in rewards.items()}
    inner = {f"{name}.{part}": value for name, reward in rewards.items() for part, value in reward.parts.items()}
    return Reward(sum(weights[name] * value for name, value in values.items()), values | inner)


async def _verify(
    pool: RewardPool, verifier: Verifier, responses: Sequence[str], prompt: Prompt
) -> list[Reward | Failure]:
    if sum(map(len, responses)) <= SHORT_TOKENS * _CHARACTERS:
        settled = [verifier.quick(response, prompt.answer) for response in responses]
    else:
        given = await pool.call(functools.partial(texts_of.of_each, verifier.quick), responses, prompt.answer)
        settled = [None] * len(responses) if isinstance(given, Failure) else given

    async def one(response: str, settled: float | None) -> Reward | Failure:
        if settled is not None:
            return Reward(settled)
        outcome = await pool.call(functools.partial(worker.itself, verifier.verify), response, prompt.answer)
        return outcome if isinstance(outcome, Failure) else Reward(outcome)

    return await asyncio.gather(*map(one, responses, settled))


class _OfFunction:
    """A user's function as a Judge. This process does not load the function."""

    def __init__(self, pool: RewardPool, function: Portable) -> None:
        self._pool, self._function = pool, function
        self._compares: bool | None = None

    async def __call__(self, responses: Sequence[str], prompt: Prompt) -> list[Reward | Failure]:
        if self._compares is None:
            answer = await self._pool.call(functools.partial(functions.group_test, self._function))
            if isinstance(answer, Failure):
                return [answer] * len(responses)
            self._compares = answer
        calls = [responses] if self._compares else [[response] for response in responses]
        judge, row = functools.partial(functions.judge, self._function), dict(prompt.row)
        outcomes = await asyncio.gather(*(self._pool.call(judge, call, row) for call in calls))
        return [
            result
            for call, outcome in zip(calls, outcomes, strict=True)
            for result in ([outcome] * len(call) if isinstance(outcome, Failure) else outcome)
        ]
