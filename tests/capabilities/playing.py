"""A model in the place of the servers, and a reward, for episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from scripted import Model, tokenizer

from areal_like.rollout.pool import Response, Sampling
from areal_like.types import Prompt, Reward

ASK = 'client.chat.completions.create(model="policy", messages=[{"role": "user", "content": row["question"]}])'


class Pool(Model):
    """A model in the place of the servers."""

    version = 3

    def __init__(self, failure: Exception | None = None) -> None:
        own = tokenizer("plain")
        super().__init__(lambda n: [*own.encode_text("ab"), own.eos_token_ids[0]])
        self.failure = failure
        self.sessions: list[Any] = []
        self.seeds: list[int | None] = []
        self.prefilled: list[list[int]] = []
        self.cancelled: list[Response] = []

    def cancel(self, responses: Sequence[Response]) -> None:
        self.cancelled += responses

    async def sample(self, tokens: Sequence[int], sampling: Sampling, **more: Any) -> Any:
        self.sessions.append(more["session"])
        self.seeds.append(more.get("seed"))
        await asyncio.sleep(0)
        if self.failure:
            raise self.failure
        if sampling.max_new_tokens == 1:
            self.prefilled.append(list(tokens))
            return Response()
        return await super().sample(tokens, sampling)


async def score(prompt: Prompt, responses: Sequence[Any]) -> list[Reward]:
    return [Reward(float(len(response))) for response in responses]
