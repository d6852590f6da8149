"""The argument of a workflow of a whole group: `async def run(prompt, n, rollout) -> list[Trajectory]`.

It lives in the worker process that runs the group, and requests everything recorded from the main process.
"""

import pickle
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_like.capabilities.agents.parameters import parameters
from areal_like.capabilities.agents.workers.worker import Ask, AskNow
from areal_like.core.rollout.joining import Part, join_parts
from areal_like.core.rollout.sample import Response, Sampling
from areal_like.core.types import FinishReason, Ints, Prompt, Reward, Trajectory
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
