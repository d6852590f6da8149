"""What an episode has generated, token for token, as a tree of turns; its paths are the trajectories."""

import asyncio
import bisect
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from areal_like.data.tokenizer import Tokenizer, TokenizerError
from areal_like.errors import RunError
from areal_like.rollout.pool import Response, Sampling
from areal_like.types import FinishReason, Ints, Prompt, Reward, Trajectory
from areal_like.workflows.attempts import ONCE, Attempts, Sending
from areal_like.workflows.conversation import Context, Continuity, Message, following, opening
from areal_like.workflows.joining import Part, joined

type Sample = Callable[[Sequence[int], Sampling], Awaitable[Response]]
"""One response to a prompt's tokens."""

type ParseTools = Callable[[str, Sequence[dict[str, Any]]], Coroutine[Any, Any, tuple[str, list[tuple[str, Any]]]]]
"""From a response's text and the tools to what is left of the text, and name and arguments of each call."""


class Refused(Exception):
    """A request that cannot be answered: `param` is its field, `code` a word for programs."""

    def __init__(self, message: str, param: str | None = None, code: str = "unsupported_value") -> None:
        super().__init__(message)
        self.param, self.code = param, code


@dataclass(frozen=True)
class Request:
    """The next turn of a conversation, as a workflow asks for it; `max_tokens` None is as many as the run allows."""

    messages: Sequence[Message]
    context: Context = field(default_factory=Context)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(eq=False)
class Turn:
    """A request and what was generated for it. `new` is what its prompt has beyond the parent's tokens.

    `messages` is the conversation with the answer; `why` says more about `continuity`. `delivered` is False where the
    connection closed before the answer was sent, True where it was sent or the conversation goes on from it.
    """

    parent: "Turn | None"
    new: Ints
    response: Response
    messages: Sequence[Message]
    context: Context
    continuity: Continuity
    why: str = ""
    delivered: bool | None = None

    @property
    def is_orphan(self) -> bool:
        """Whether nobody has read the answer; such a turn is not trained on."""
        return self.delivered is False

    @property
    def path(self) -> list["Turn"]:
        """The turns that lead here, the first one first."""
        turns = [self]
        while (parent := turns[-1].parent) is not None:
            turns.append(parent)
        return turns[::-1]

    @property
    def tokens(self) -> Ints:
        """The prompt of this turn and its response."""
        parts = [part for turn in self.path for part in (turn.new, turn.response.tokens)]
        return np.concatenate(parts).astype(np.int32)


@dataclass(frozen=True)
class Limits:
    """Limits of one episode: turns, and tokens of the longest trajectory, tool output included."""

    max_turns: int
    max_tokens: int


@dataclass(eq=False)
class Session:
    """Everything generated in one episode. `sampling` is how every turn of it is sampled, and `trained` whether it will
    be trained on. Without `parse_tools` requests with tools are refused.
    """

    tokenizer: Tokenizer
    sample: Sample
    sampling: Sampling
    limits: Limits
    parse_tools: ParseTools | None = None
    trained: bool = True
    turns: list[Turn] = field(default_factory=list)
    exceeded: str = ""  # the limit that a turn was refused for
    failure: BaseException | None = None  # of the servers, which is the run's, whatever the workflow makes of it
    attempts: Attempts[Turn] = field(default_factory=Attempts)
    repeated: int = 0  # requests that got the answer of an earlier attempt
    _discarded: int = 0  # tokens of answers that were aborted once they were generated
    _asked: int = 0

    async def complete(self, request: Request, sent: Sending = ONCE) -> Turn:
        """Generate the next message of a conversation and record it, or return that of an earlier attempt.

        Raises Refused for a request beyond the limits or that the chat template refuses.
        """
        if (earlier := self.attempts.repeated(request, sent)) is not None:
            self.repeated += 1
            return await earlier.turn()
        turns = self._asked - self.attempts.aborted
        if turns >= self.limits.max_turns:
            raise self._exceeds("turns", f"the episode has had {turns} turns (episode.max_turns)")
        self._asked += 1
        return await self.attempts.begin(request, sent, self._complete(request, self._asked)).turn()

    async def _complete(self, request: Request, number: int) -> Turn:
        parent, new, continuity, why = self._place(request)
        if parent:
            parent.delivered = True  # who goes on from an answer has read it
        earlier = parent.tokens if parent else np.zeros(0, np.int32)
        tokens = np.concatenate([earlier, np.array(new, np.int32)])
        response = self._until(await self.generate(tokens, request.max_tokens), request.stop)
        try:
            answer = await self._answer(request, response, number)
        except asyncio.CancelledError:
            self._discarded += len(response.tokens)
            raise
        turn = Turn(
            parent, tokens[len(earlier) :], response, [*request.messages, answer], request.context, continuity, why
        )
        self.turns.append(turn)
        return turn

    async def generate(self, tokens: Ints, max_tokens: int | None = None) -> Response:
        """A response to a prompt of token ids, as long as the run, the limits and `max_tokens` allow.

        Raises Refused for a prompt that leaves no room for one, and what the servers fail of, which `failure` keeps.
        """
        room = self.limits.max_tokens - len(tokens)
        if room < 1:
            problem = f"a prompt of {len(tokens)} tokens leaves no room among {self.limits.max_tokens}"
            raise self._exceeds("tokens", f"{problem} (episode.max_tokens)", "context_length_exceeded")
        most = min(room, self.sampling.max_new_tokens, max_tokens or room)
        try:
            return await self.sample(tokens.tolist(), replace(self.sampling, max_new_tokens=most))
        except RunError as failure:
            self.failure = failure
            raise

    def trajectories(self, prompt: Prompt, group_id: int, reward: Reward) -> list[Trajectory]:
        """A trajectory for each turn that none goes on from, all with the same reward; orphans are left out.

        Every generated token is trained on once: where several go on from the same turn, it counts as generated in the
        first, and is part of the prompt of the others.
        """
        turns = self.read  # another thread may still be at it, where the episode ran out of time
        parents = {id(turn.parent) for turn in turns}
        known: set[int] = set()
        result = []
        for leaf in (turn for turn in turns if id(turn) not in parents):
            parts: list[Part] = []
            for turn in leaf.path:
                parts += [turn.new, turn.response.tokens if id(turn) in known else turn.response]
            result.append(joined(prompt, group_id, parts, reward))
            known |= {id(turn) for turn in leaf.path}
        return result

    @property
    def read(self) -> list[Turn]:
        """The turns that are not orphans."""
        return [turn for turn in self.turns if not turn.is_orphan]

    @property
    def orphans(self) -> list[Turn]:
        """The turns whose answers nobody has read."""
        return [turn for turn in self.turns if turn.is_orphan]

    @property
    def tokens_orphaned(self) -> int:
        """How many tokens were generated for answers that nobody has read."""
        return self._discarded + sum(len(turn.response.tokens) for turn in self.orphans)

    @property
    def continuities(self) -> Counter[Continuity]:
        """How many turns that are not orphans were of each kind."""
        return Counter(turn.continuity for turn in self.read)

    def _exceeds(self, limit: str, message: str, code: str = "episode_limit_exceeded") -> Refused:
        self.exceeded = self.exceeded or limit
        return Refused(message, "messages", code)

    def _place(self, request: Request) -> tuple[Turn | None, list[int], Continuity, str]:
        """The turn that a request goes on from, what is new, and how that was found."""
        parent, why = self._parent(request)
        try:
            if parent is not None:
                answered = len(parent.messages) - 1
                try:
                    new, continuity = following(
                        self.tokenizer, parent.tokens.tolist(), request.messages, answered, request.context
                    )
                    return parent, new, continuity, why
                except TokenizerError as error:
                    why = f"{error}, with a plain answer in place of message {answered}"
            new = opening(self.tokenizer, request.messages, request.context)
        except TokenizerError as error:
            raise Refused(str(error), "messages", "template_error") from error
        return None, new, Continuity.BRANCH if self.turns else Continuity.FIRST, why

    def _parent(self, request: Request) -> tuple[Turn | None, str]:
        """The longest earlier conversation that the request's begins with, or why there is none."""
        if not self.turns:
            return None, ""
        asked = [_canonical(message) for message in request.messages]
        best, most_common = None, 0
        for turn in self.turns:
            had = [_canonical(message) for message in turn.messages]
            pairs = zip(had, asked, strict=False)
            common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            if common == len(had) and turn.context == request.context:
                best = turn if best is None or len(had) > len(best.messages) else best
            most_common = max(most_common, common)
        if best is not None:
            return best, ""
        if most_common == len(asked):
            return None, "these messages were asked about before"
        return None, f"message {most_common} is another than before, or tools or template arguments are"

    def _until(self, response: Response, stop: Sequence[str]) -> Response:
        """A response up to the token that completes one of the texts; servers know tokens only, and go on."""
        tokens = response.tokens.tolist()

        def stopped(size: int) -> bool:  # a special token may be such a text, or lie within one
            texts = (self.tokenizer.decode(tokens[:size], special=special) for special in (True, False))
            return any(_place_of_first(text, stop) is not None for text in texts)

        if not stop or not stopped(len(tokens)):
            return response
        n = bisect.bisect_left(range(len(tokens)), True, key=stopped)
        cut = Response(response.tokens[:n], response.logprobs[:n], response.versions[:n])
        cut.finish_reason = FinishReason.STOP
        return cut

    async def _answer(self, request: Request, response: Response, number: int) -> dict[str, Any]:
        """The assistant's message that a response is."""
        tools = request.context.tools
        tokens = response.tokens.tolist()
        if tokens and tokens[-1] in self.tokenizer.eos_token_ids:
            tokens = tokens[:-1]
        # families mark their tool calls with special tokens
        text = self.tokenizer.decode(tokens, special=bool(tools))
        text = text[: _place_of_first(text, request.stop)]
        calls: list[tuple[str, Any]] = []
        if tools and self.parse_tools is not None:
            text, calls = await self.parse_tools(text, tools)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {"id": f"call_{number}_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(calls)
            ]
        return message


def _place_of_first(text: str, words: Sequence[str]) -> int | None:
    """Return where the first of some words begins in a text; None where none of them does."""
    return min((place for word in words if (place := text.find(word)) >= 0), default=None)


def _canonical(message: Message) -> dict[str, Any]:
    """Return the part of a returned message that must match; frameworks strip answers and change tool-call ids."""
    if message["role"] != "assistant":
        return dict(message)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return {"role": "assistant", "content": (message.get("content") or "").strip(), "calls": calls}
