"""The generated tokens of an episode as a tree of turns; its paths are the trajectories."""

import asyncio
import bisect
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from areal_like.capabilities.agents.attempts import ONCE, Attempt, Attempts, Progress, Sending
from areal_like.capabilities.agents.continued_answers import start_of, with_answer
from areal_like.capabilities.agents.conversation import Continuity, Message, TemplateContext, following, opening
from areal_like.capabilities.agents.replies import Refused as Refused
from areal_like.capabilities.agents.turn import Turn, join_turns
from areal_like.core.config.schema import MOST_KEPT
from areal_like.core.errors import RunError
from areal_like.core.rollout.sample import OnTokens, Response, Sampling
from areal_like.core.types import TEMPERATURES, FinishReason, Images, Ints, Prompt, Reward, Trajectory
from areal_like.data.processor import images_of
from areal_like.data.tokenizer import Tokenizer, TokenizerError

LEAST_LETTERS = 16  # minimum length of a summary; shorter answers occur in other texts by chance


def find_summary(turns: Sequence[Turn], messages: Sequence[Message]) -> Turn | None:
    """Return the latest turn without a continuation whose answer is in the messages of a new conversation."""
    parents = {turn.parent for turn in turns}
    texts = [message["content"] for message in messages if isinstance(message.get("content"), str)]
    for turn in reversed(turns):
        if turn not in parents and any(_contains(text, turn) for text in texts):
            return turn
    return None


def _contains(text: str, turn: Turn) -> bool:
    """Return whether a text contains the answer of a turn, with or without its thinking."""
    answer = turn.messages[-1].get("content") or ""
    summaries = {part.strip() for part in (answer, answer.rpartition("</think>")[2])}
    return any(len(summary) >= LEAST_LETTERS and summary in text for summary in summaries)


class Sampler(Protocol):
    """Generates one response to a prompt's tokens, with columns of inputs, if any, of tokens from `inputs_from` on.

    `images` are the prompt's. `on_tokens` receives the response's tokens as they arrive.
    """

    def __call__(
        self, tokens: Sequence[int], sampling: Sampling, *, inputs_from: int, on_tokens: OnTokens | None, images: Images
    ) -> Awaitable[Response]: ...


type ParseTools = Callable[[str, Sequence[dict[str, Any]]], Coroutine[Any, Any, tuple[str, list[tuple[str, Any]]]]]
"""From a response's text and the tools to what is left of the text, and name and arguments of each call."""


@dataclass(frozen=True)
class Request:
    """A workflow's request for the next turn of a conversation.

    `max_tokens` None means the run's limit; None for temperature, `top_p` and `top_k` means the run's value.
    """

    messages: Sequence[Message]
    context: TemplateContext = field(default_factory=TemplateContext)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


@dataclass(frozen=True)
class Limits:
    """Limits of one episode: turns, and tokens of the longest trajectory, tool output included.

    `own_sampling` allows requests to set other values of temperature, `top_p` or `top_k` than the run's. `models` has
    the allowed model names, where `*` matches any text. With `as_deployed` a prompt is always the rendered
    conversation, even if the chat template changes earlier turns. `ignored_fields` are removed from requests.
    """

    max_turns: int
    max_tokens: int
    own_sampling: bool = True
    models: Sequence[str] = ("*",)
    as_deployed: bool = False
    ignored_fields: Sequence[str] = ()


@dataclass(frozen=True)
class _Place:
    """The place of a request's turn: its parent and the `new` tokens after it, or the turn that it `follows`."""

    parent: Turn | None
    new: list[int]
    continuity: Continuity
    why: str
    follows: Turn | None = None


@dataclass(eq=False)
class Session:
    """Everything generated in one episode. `sampling` is how every turn of it is sampled, and `trained` whether it will
    be trained on. Without `parse_tools` requests with tools are refused. `call_starts` are the texts that tool calls
    begin with; without them no text of an answer with tools is streamed before the answer is complete.
    """

    tokenizer: Tokenizer
    sample: Sampler
    sampling: Sampling
    limits: Limits
    parse_tools: ParseTools | None = None
    call_starts: Sequence[str] | None = None
    trained: bool = True
    turns: list[Turn] = field(default_factory=list)
    shared: Sequence[tuple[object, Turn]] = ()  # another episode's requests and turns, with which this one starts
    on_request: Callable[[], object] = lambda: None  # called before a request that is not a repetition is answered
    exceeded: str = ""  # the limit for which a turn was rejected
    failure: BaseException | None = None  # of the servers; it fails the run even if the workflow handles it
    attempts: Attempts = field(default_factory=Attempts)
    repeated: int = 0  # requests that got the answer of an earlier attempt
    _begun_with: set[Turn] = field(default_factory=set)  # part of `shared`
    _discarded: int = 0  # generated tokens of aborted answers
    _asked: int = 0

    async def complete(self, request: Request, sent: Sending = ONCE) -> Turn:
        """Generate and record the next message of a conversation, or return an earlier attempt's.

        Raises Refused for a request that exceeds the limits or that the chat template rejects.
        """
        return await self.begin(request, sent).turn()

    def begin(self, request: Request, sent: Sending = ONCE, *, streamed: bool = False) -> Attempt:
        """Start generating the next message of a conversation, or return the earlier attempt that has it.

        A streamed attempt has its tokens as they arrive. Raises Refused for a request beyond the limit of turns.
        """
        if (earlier := self.attempts.find_repeated(request, sent)) is not None:
            self.repeated += 1
            return earlier
        turns = self._asked - self.attempts.aborted
        if turns >= self.limits.max_turns:
            raise self._exceeds("turns", f"the episode has had {turns} turns (episode.max_turns)")
        self._asked += 1
        self.on_request()
        progress = Progress() if streamed else None
        return self.attempts.begin(request, sent, self._complete(request, self._asked, progress), progress)

    async def _complete(self, request: Request, number: int, progress: Progress | None) -> Turn:
        if (shared := self._take_shared(request)) is not None:
            if progress is not None:
                progress.prompt_tokens = shared.prompt_tokens
                progress.add(shared.response.tokens.tolist())
            return shared
        place = self._place(request)
        parent = place.parent
        earlier = parent.tokens if parent else np.zeros(0, np.int32)
        tokens = np.concatenate([earlier, np.array(place.new, np.int32)])
        known = parent.known_inputs if parent else 0
        images = images_of(request.messages[len(parent.messages) :] if parent else request.messages)
        shown = (parent.all_images if parent else ()) + images
        on_tokens = None
        if progress is not None:
            progress.prompt_tokens, on_tokens = len(tokens), progress.add
        made = await self.generate(tokens, request.max_tokens, known, self._sampling(request), on_tokens, shown)
        response, stopped_by = self._until(made, request.stop)
        try:
            answer = await self._answer(request, response, number)
        except asyncio.CancelledError:
            self._discarded += len(response.tokens)
            raise
        messages = with_answer(request.messages, answer)
        about = (messages, request.context, place.continuity, place.why, place.follows)
        turn = Turn(
            parent,
            tokens[len(earlier) :],
            response,
            *about,
            images=images,
            start=start_of(request.messages),
            stopped_by=stopped_by,
        )
        self.turns.append(turn)
        return turn

    def _take_shared(self, request: Request) -> Turn | None:
        """Return the shared turn of another episode with the same request, if there is one."""
        found = next((turn for asked, turn in self.shared if asked == request), None)
        if found is not None:
            self.shared = [each for each in self.shared if each[1] is not found]
            self.turns.append(found)
            self._begun_with.add(found)
        return found

    def _sampling(self, request: Request) -> Sampling:
        """Return the sampling of a request's turn; evaluations and the run's limits override the request.

        If sampling is truncated without a `top_k` whose ids servers can return, the largest such `top_k` is used.
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
        known: int = 0,
        sampling: Sampling | None = None,
        on_tokens: OnTokens | None = None,
        images: Images = (),
    ) -> Response:
        """Generate a response to a prompt of token ids, as long as the run, the limits and `max_tokens` allow.

        The columns of the first `known` tokens as inputs are known, if any are needed. `on_tokens` receives the tokens
        as they arrive. `images` are the prompt's.

        Raises Refused for a prompt that is too long for a response, and the servers' failures, also kept in `failure`.
        """
        room = self.limits.max_tokens - len(tokens)
        if room < 1:
            problem = f"a prompt of {len(tokens)} tokens leaves no room among {self.limits.max_tokens}"
            raise self._exceeds("tokens", f"{problem} (episode.max_tokens)", "context_length_exceeded")
        most = min(room, self.sampling.max_new_tokens, max_tokens or room)
        try:
            wanted = replace(sampling or self.sampling, max_new_tokens=most)
            response = await self.sample(tokens.tolist(), wanted, inputs_from=known, on_tokens=on_tokens, images=images)
        except RunError as failure:
            self.failure = failure
            raise
        if wanted.temperature != self.sampling.temperature:
            own = np.full(len(response.tokens), wanted.temperature, np.float32)
            response.columns = {TEMPERATURES: own, **response.columns}
        return response

    def count_prompt(self, request: Request) -> int:
        """Return the number of tokens of a request's prompt, without answering it; raises Refused."""
        place = self._place(request)
        return len(place.new) + (len(place.parent.tokens) if place.parent else 0)

    def trajectories(
        self, prompt: Prompt, group_id: int, reward: Reward, numbers: dict[Turn, int] | None = None
    ) -> list[Trajectory]:
        """Return a trajectory for each conversation, all with the same reward; see `join_turns`."""
        return join_turns(self.read, prompt, group_id, reward, numbers)

    @property
    def read(self) -> list[Turn]:
        """The turns that are not orphans."""
        return [turn for turn in self.turns if not turn.is_orphan]

    @property
    def orphans(self) -> list[Turn]:
        """The turns whose answers no client has read, without shared turns."""
        return [turn for turn in self.turns if turn.is_orphan and turn not in self._begun_with]

    @property
    def tokens_orphaned(self) -> int:
        """Number of tokens generated for answers that no client has read."""
        return self._discarded + sum(len(turn.response.tokens) for turn in self.orphans)

    @property
    def continuities(self) -> Counter[Continuity]:
        """The number of turns of each kind, without orphans and shared turns."""
        return Counter(turn.continuity for turn in self.read if turn not in self._begun_with)

    def _exceeds(self, limit: str, message: str, code: str = "episode_limit_exceeded") -> Refused:
        self.exceeded = self.exceeded or limit
        return Refused(message, "messages", code)

    def _place(self, request: Request) -> _Place:
        """Find the turn that a request continues, and the new tokens."""
        parent, why = self._parent(request)
        kind, follows = Continuity.BRANCH if self.turns else Continuity.FIRST, parent
        try:
            if parent is not None:
                parent.delivered = True  # a client that continues an answer has read it
                answered = len(parent.messages) - 1
                try:
                    new, continuity = following(
                        self.tokenizer, parent.tokens.tolist(), request.messages, answered, request.context
                    )
                    if continuity is Continuity.EXACT or not self.limits.as_deployed:
                        return _Place(parent, new, continuity, why)
                    kind, why = Continuity.DEPLOYED, f"the prompt is {continuity} (episode.history=as_deployed)"
                except TokenizerError as error:
                    why = f"{error}, with a plain answer in place of message {answered}"
            elif (follows := find_summary(self.turns, request.messages)) is not None:
                follows.delivered = True
                kind, why = (
                    Continuity.COMPACTED,
                    "the messages contain an earlier answer without the conversation before it",
                )
            new = opening(self.tokenizer, request.messages, request.context)
        except TokenizerError as error:
            raise Refused(str(error), "messages", "template_error") from error
        return _Place(None, new, kind, why, follows)

    def _parent(self, request: Request) -> tuple[Turn | None, str]:
        """Return the longest earlier conversation that the request continues, or the reason why there is none."""
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

    def _until(self, response: Response, stop: Sequence[str]) -> tuple[Response, str | None]:
        """Return a response up to the token that completes a stop text, and that text; servers stop at tokens only."""
        tokens = response.tokens.tolist()

        def stop_text(size: int) -> str | None:  # a special token may be a stop text or part of one
            texts = (self.tokenizer.decode(tokens[:size], special=special) for special in (True, False))
            return next((found[1] for text in texts if (found := _first(text, stop))), None)

        if not stop or not stop_text(len(tokens)):
            return response, None
        n = bisect.bisect_left(range(len(tokens)), True, key=lambda size: stop_text(size) is not None)
        cut = response.cut(n)
        cut.finish_reason = FinishReason.STOP
        return cut, stop_text(n)

    async def _answer(self, request: Request, response: Response, number: int) -> dict[str, Any]:
        """Return the assistant's message of a response."""
        tools = request.context.tools
        tokens = response.tokens.tolist()
        if tokens and tokens[-1] in self.tokenizer.eos_token_ids:
            tokens = tokens[:-1]
        # families mark their tool calls with special tokens
        text = self.tokenizer.decode(tokens, special=bool(tools))
        text = text[: found[0] if (found := _first(text, request.stop)) else None]
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


def _first(text: str, words: Sequence[str]) -> tuple[int, str] | None:
    """Return the start of the first of these words in a text, and the word; None if the text has none."""
    return min(((place, word) for word in words if (place := text.find(word)) >= 0), default=None)


def _canonical(message: Message) -> dict[str, Any]:
    """Return the part of a message that must match; agent frameworks strip answers and change tool-call ids."""
    if message["role"] != "assistant":
        return dict(message)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return {"role": "assistant", "content": (message.get("content") or "").strip(), "calls": calls}
