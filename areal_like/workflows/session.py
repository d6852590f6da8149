"""What an episode has generated, token for token, as a tree of turns; its paths are the trajectories."""

import asyncio
import bisect
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from areal_like.config.schema import MOST_KEPT
from areal_like.data.tokenizer import Tokenizer, TokenizerError
from areal_like.errors import RunError
from areal_like.rollout.sample import OnTokens, Response, Sampling
from areal_like.types import FinishReason, Floats, Ints, Prompt, Reward, Trajectory
from areal_like.workflows.attempts import ONCE, Attempt, Attempts, Sending
from areal_like.workflows.conversation import Context, Continuity, Message, following, opening
from areal_like.workflows.joining import Part, join_parts, not_trained
from areal_like.workflows.progress import Progress


class Sample(Protocol):
    """One response to a prompt's tokens, with the routes, if any are wanted, of tokens from `routes_from` on.

    `on_tokens` receives the response's tokens as they arrive.
    """

    def __call__(
        self, tokens: Sequence[int], sampling: Sampling, *, routes_from: int, on_tokens: OnTokens | None
    ) -> Awaitable[Response]: ...


type ParseTools = Callable[[str, Sequence[dict[str, Any]]], Coroutine[Any, Any, tuple[str, list[tuple[str, Any]]]]]
"""From a response's text and the tools to what is left of the text, and name and arguments of each call."""


class Refused(Exception):
    """A request that cannot be answered: `param` is its field, `code` a word for programs, `status` that of HTTP."""

    def __init__(
        self, message: str, param: str | None = None, code: str = "unsupported_value", status: int = 400
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True)
class Request:
    """The next turn of a conversation, as a workflow asks for it.

    `max_tokens` None is as many as the run allows; temperature, `top_p` and `top_k` None are the run's.
    """

    messages: Sequence[Message]
    context: Context = field(default_factory=Context)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


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

    @property
    def tokens_routed(self) -> int:
        """How many of `tokens`, from the first one on, have routes in this turn or one before."""
        return len(self.tokens) - 1 if self.response.routes is not None and len(self.response.tokens) else 0


@dataclass(frozen=True)
class Limits:
    """Limits of one episode: turns, and tokens of the longest trajectory, tool output included.

    `own_sampling` is whether a request may choose another temperature, `top_p` or `top_k` than the run's. `models` are
    the names that requests may give the model, where `*` stands for any text. With `as_deployed` a prompt is what the
    chat template makes of the whole conversation, also where it writes earlier turns otherwise than the model did.
    """

    max_turns: int
    max_tokens: int
    own_sampling: bool = True
    models: Sequence[str] = ("*",)
    as_deployed: bool = False


@dataclass(eq=False)
class Session:
    """Everything generated in one episode. `sampling` is how every turn of it is sampled, and `trained` whether it will
    be trained on. Without `parse_tools` requests with tools are refused. `call_starts` are the texts that tool calls
    begin with; without them no text of an answer with tools is streamed before the answer is complete.
    """

    tokenizer: Tokenizer
    sample: Sample
    sampling: Sampling
    limits: Limits
    parse_tools: ParseTools | None = None
    call_starts: Sequence[str] | None = None
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
        return await self.begin(request, sent).turn()

    def begin(self, request: Request, sent: Sending = ONCE, *, streamed: bool = False) -> Attempt[Turn]:
        """Start to generate the next message of a conversation, or return the earlier attempt that has it.

        A streamed attempt has its tokens as they arrive. Raises Refused for a request beyond the limit of turns.
        """
        if (earlier := self.attempts.find_repeated(request, sent)) is not None:
            self.repeated += 1
            return earlier
        turns = self._asked - self.attempts.aborted
        if turns >= self.limits.max_turns:
            raise self._exceeds("turns", f"the episode has had {turns} turns (episode.max_turns)")
        self._asked += 1
        progress = Progress() if streamed else None
        return self.attempts.begin(request, sent, self._complete(request, self._asked, progress), progress)

    async def _complete(self, request: Request, number: int, progress: Progress | None) -> Turn:
        parent, new, continuity, why = self._place(request)
        earlier = parent.tokens if parent else np.zeros(0, np.int32)
        tokens = np.concatenate([earlier, np.array(new, np.int32)])
        routed = parent.tokens_routed if parent else 0
        on_tokens = None
        if progress is not None:
            progress.prompt_tokens, on_tokens = len(tokens), progress.add
        made = await self.generate(tokens, request.max_tokens, routed, self._sampling(request), on_tokens)
        response = self._until(made, request.stop)
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

    def _sampling(self, request: Request) -> Sampling:
        """Return how a request's turn is sampled; evaluations and a run's limits leave it no choice.

        Where it is cut without a `top_k` that servers return the ids of, the largest such one is taken.
        """
        if not self.trained:
            return self.sampling
        own = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k")}
        sampling = replace(self.sampling, **{name: value for name, value in own.items() if value is not None})
        limited = 0 < sampling.top_k <= MOST_KEPT
        return replace(sampling, top_k=MOST_KEPT) if sampling.is_cut and not limited else sampling

    async def generate(
        self,
        tokens: Ints,
        max_tokens: int | None = None,
        routed: int = 0,
        sampling: Sampling | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Response:
        """A response to a prompt of token ids, as long as the run, the limits and `max_tokens` allow.

        The routes of the first `routed` tokens are known, if routes are wanted at all. `on_tokens` receives the tokens
        as they arrive.

        Raises Refused for a prompt that leaves no room for one, and what the servers fail of, which `failure` keeps.
        """
        room = self.limits.max_tokens - len(tokens)
        if room < 1:
            problem = f"a prompt of {len(tokens)} tokens leaves no room among {self.limits.max_tokens}"
            raise self._exceeds("tokens", f"{problem} (episode.max_tokens)", "context_length_exceeded")
        most = min(room, self.sampling.max_new_tokens, max_tokens or room)
        try:
            wanted = replace(sampling or self.sampling, max_new_tokens=most)
            response = await self.sample(tokens.tolist(), wanted, routes_from=routed, on_tokens=on_tokens)
        except RunError as failure:
            self.failure = failure
            raise
        if wanted.temperature != self.sampling.temperature:
            response.temperature = wanted.temperature
        return response

    def trajectories(self, prompt: Prompt, group_id: int, reward: Reward) -> list[Trajectory]:
        """A trajectory for each turn that none goes on from, all with the same reward; orphans are left out.

        Every generated token is trained on once: where several go on from the same turn, it counts as generated in the
        first, and is part of the prompt of the others. Rewards of turns are those of `read`, in this order.
        """
        turns = self.read  # another thread may still be at it, where the episode ran out of time
        parents = {id(turn.parent) for turn in turns}
        worth = {id(turn): value for turn, value in zip(turns, reward.turns, strict=False)}
        known: set[int] = set()
        result = []
        for leaf in (turn for turn in turns if id(turn) not in parents):
            parts: list[Part] = []
            for turn in leaf.path:
                parts += [turn.new, not_trained(turn.response) if id(turn) in known else turn.response]
            item = join_parts(prompt, group_id, parts, reward)
            result.append(replace(item, turn_rewards=_turn_rewards(leaf.path, worth)) if worth else item)
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
        kind = Continuity.BRANCH if self.turns else Continuity.FIRST
        try:
            if parent is not None:
                parent.delivered = True  # who goes on from an answer has read it
                answered = len(parent.messages) - 1
                try:
                    new, continuity = following(
                        self.tokenizer, parent.tokens.tolist(), request.messages, answered, request.context
                    )
                    if continuity is Continuity.EXACT or not self.limits.as_deployed:
                        return parent, new, continuity, why
                    kind, why = Continuity.DEPLOYED, f"the prompt is {continuity} (episode.history=as_deployed)"
                except TokenizerError as error:
                    why = f"{error}, with a plain answer in place of message {answered}"
            new = opening(self.tokenizer, request.messages, request.context)
        except TokenizerError as error:
            raise Refused(str(error), "messages", "template_error") from error
        return None, new, kind, why

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
            return None, "these messages were sent before"
        return None, f"message {most_common} differs from earlier requests, or the tools or template arguments do"

    def _until(self, response: Response, stop: Sequence[str]) -> Response:
        """A response up to the token that completes one of the texts; servers know tokens only, and go on."""
        tokens = response.tokens.tolist()

        def has_stop(size: int) -> bool:  # a special token may be such a text, or lie within one
            texts = (self.tokenizer.decode(tokens[:size], special=special) for special in (True, False))
            return any(_place_of_first(text, stop) is not None for text in texts)

        if not stop or not has_stop(len(tokens)):
            return response
        n = bisect.bisect_left(range(len(tokens)), True, key=has_stop)
        cut = response.cut(n)
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


def _turn_rewards(path: Sequence[Turn], worth: Mapping[int, float]) -> Floats:
    """Return the reward of each turn at its last token, `[tokens]` of the trajectory."""
    result = np.zeros(len(path[-1].tokens), np.float32)
    ends = np.cumsum([len(turn.new) + len(turn.response.tokens) for turn in path])
    for turn, end in zip(path, ends, strict=True):
        result[end - 1] += worth.get(id(turn), 0.0) if len(turn.response.tokens) else 0.0
    return result


def _place_of_first(text: str, words: Sequence[str]) -> int | None:
    """Return where the first of some words begins in a text; None where none of them does."""
    return min((place for word in words if (place := text.find(word)) >= 0), default=None)


def _canonical(message: Message) -> dict[str, Any]:
    """Return the part of a returned message that must match; frameworks strip answers and change tool-call ids."""
    if message["role"] != "assistant":
        return dict(message)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return {"role": "assistant", "content": (message.get("content") or "").strip(), "calls": calls}
