"""A reward model on servers of its own: a sequence classifier with one logit, the reward."""

import asyncio
import itertools
import json
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from areal_like.data.tokenizer import Tokenizer, TokenizerError
from areal_like.errors import ServerError
from areal_like.rewards.pool import Cause, Failure
from areal_like.rollout.backends import DEFAULT, find_backend
from areal_like.rollout.http import session
from areal_like.types import Prompt, Reward


class RewardModel(AbstractAsyncContextManager["RewardModel"]):
    """Scores conversations, each with a response for its last message; a Judge (`rewards/scoring.py`).

    The conversation is rendered with the chat template and the tokenizer of the reward model at `directory`, whatever
    the policy's are. The score is the logit at the last token that is not padding, as in transformers. `timeout_s`
    limits the time for one response, including the wait for its turn at the server.
    """

    def __init__(
        self, urls: Sequence[str], token: str, directory: Path, timeout_s: float, backend: str = DEFAULT
    ) -> None:
        self._tokenizer = Tokenizer.load(str(directory))
        self._padding = json.loads((directory / "config.json").read_text()).get("pad_token_id")
        self._session = session(token)
        connect = find_backend(backend).connect
        self._servers = itertools.cycle(
            [connect(f"reward server {rank}", url, self._session, rank, aftermath_s=0) for rank, url in enumerate(urls)]
        )
        self._timeout_s = timeout_s

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def __call__(self, responses: Sequence[str], prompt: Prompt) -> list[Reward | Failure]:
        """Return a reward or a failure for each response."""
        return await asyncio.gather(*(self._score(prompt, response) for response in responses))

    async def _score(self, prompt: Prompt, response: str) -> Reward | Failure:
        try:
            tokens = await asyncio.to_thread(self._tokens, prompt, response)  # takes tens of milliseconds if long
            return Reward(await next(self._servers).classify(tokens, self._timeout_s))
        except TokenizerError as error:
            return Failure(Cause.RAISED, f"the reward model's tokenizer: {error}")
        except (ValueError, LookupError, TypeError) as error:
            return Failure(Cause.RAISED, f"the conversation cannot be encoded for the reward model: {error!r}")
        except ServerError as error:
            if error.fault == "late":
                return Failure(Cause.TIMED_OUT, f"the reward model took more than {self._timeout_s:g} s")
            return Failure(Cause.DIED if error.fault == "connection" else Cause.RAISED, str(error))

    def _tokens(self, prompt: Prompt, response: str) -> list[int]:
        conversation = [*prompt.messages(), {"role": "assistant", "content": response}]
        tokens = self._tokenizer.encode_chat(conversation, add_generation_prompt=False)
        while len(tokens) > 1 and tokens[-1] == self._padding:
            tokens.pop()
        return tokens
