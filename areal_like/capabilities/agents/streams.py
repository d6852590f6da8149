"""Streaming of answers to clients during generation."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from areal_like.capabilities.agents.attempts import Attempt
from areal_like.capabilities.agents.replies import Refused
from areal_like.capabilities.agents.session import Request, Session
from areal_like.capabilities.agents.turn import Turn
from areal_like.core.errors import RunError
from areal_like.data.tokenizer import Tokenizer

# Text of tokens that arrive one by one, up to the point where later tokens can change it.
#
# Incomplete characters are held back, and so is a possible start of a text that ends the visible part: a stop text or a
# tool call. The visible text is therefore a prefix of the final text, unless a tokenizer decodes pieces differently.

_INCOMPLETE = "\ufffd"
_MOST_TOKENS = 4  # per character: its bytes in UTF-8


class Decoding:
    """Decodes tokens one by one, without special tokens unless `special` is set."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._context: list[int] = []  # the tokens of the last text: some tokenizers trim the first token of a text
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """Return the text completed by a token."""
        self._pending.append(token)
        text = self._decode(self._pending)
        complete = len(self._pending)
        if text.endswith(_INCOMPLETE):
            complete = self._last_boundary(text)
            text = self._decode(self._pending[:complete])
        if complete and (text or not self._context):
            self._context = self._pending[:complete]
        del self._pending[:complete]
        return text

    def _last_boundary(self, text: str) -> int:
        """Return the number of pending tokens before a last character that may be incomplete."""
        for size in range(len(self._pending) - _MOST_TOKENS, 0, -1):
            rest = self._tokenizer.decode(self._pending[size:], special=self._special)
            if self._decode(self._pending[:size]) + rest == text:
                return size
        return 0

    def _decode(self, tokens: Sequence[int]) -> str:
        before = self._tokenizer.decode(self._context, special=self._special)
        return self._tokenizer.decode([*self._context, *tokens], special=self._special)[len(before) :]


class VisibleText:
    """Text of an answer up to the first of some `ends`.

    With `special`, special tokens are part of the text. With `trimmed`, leading blanks are dropped and trailing ones
    held back, because parsers of tool calls remove them. With `hidden`, no text is visible.
    """

    def __init__(
        self, tokenizer: Tokenizer, ends: Sequence[str], *, special: bool, trimmed: bool, hidden: bool = False
    ) -> None:
        self._ends, self._trimmed = ends, trimmed
        self._own = Decoding(tokenizer, special=special)
        self._other = Decoding(tokenizer, special=not special)  # an end may be a special token or contain one
        self._own_tail = self._other_tail = ""
        self._parts: list[str] = []
        self._held = ""
        self._is_over = hidden
        self._end_tokens = frozenset(tokenizer.eos_token_ids)
        self._last: int | None = None  # an end token, possibly the answer's last token, which is not part of the text

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text that becomes visible with further tokens."""
        return "".join(map(self._add, tokens))

    def rest(self, text: str) -> str:
        """Return the rest of the final text after the visible text; "" if it does not start with the visible text."""
        for whole in (text, text.lstrip()) if self._trimmed else (text,):
            if whole.startswith(self.text):
                return whole[len(self.text) :]
        return ""

    @property
    def text(self) -> str:
        """Everything that is visible."""
        return "".join(self._parts)

    def _add(self, token: int) -> str:
        if self._is_over:
            return ""
        tokens = [] if self._last is None else [self._last]
        self._last = token if token in self._end_tokens else None
        if self._last is None:
            tokens.append(token)
        return "".join(map(self._show, tokens))

    def _show(self, token: int) -> str:
        if self._is_over:
            return ""
        new = self._own.add(token)
        self._held += new
        if self._ends and self._meets_end(new, self._other.add(token)):
            return ""
        return self._release()

    def _meets_end(self, own: str, other: str) -> bool:
        """Record an end in either text; return whether one has started."""
        self._own_tail, self._other_tail = self._own_tail + own, self._other_tail + other
        tails = self._own_tail, self._other_tail
        self._is_over = any(end in tail for end in self._ends for tail in tails)
        size = max(map(len, self._ends))
        self._own_tail, self._other_tail = (tail[-size:] for tail in tails)
        return self._is_over or any(
            tail.endswith(end[:n]) for end in self._ends for n in range(1, len(end)) for tail in tails
        )

    def _release(self) -> str:
        text = self._held
        if self._trimmed:
            text = text.rstrip() if self._parts else text.strip()
            self._held = self._held[len(self._held.rstrip()) :] if text else self._held
        else:
            self._held = ""
        if text:
            self._parts.append(text)
        return text


EVENT_STREAM = "text/event-stream"
_OVER = "the episode is over"


class Dialect(Protocol):
    """An answer in the format of an API: whole, or as events in bytes."""

    def whole(self, turn: Turn) -> dict[str, Any]:
        """Return a turn as an answer."""
        ...

    def start(self, prompt_tokens: int) -> bytes:
        """Return the events before the first text."""
        ...

    def text(self, delta: str) -> bytes:
        """Return the events of a piece of text."""
        ...

    def finish(self, turn: Turn, rest: str) -> bytes:
        """Return the last events, including the `rest` of the text, which may be empty."""
        ...

    def fail(self, message: str) -> bytes:
        """Return the events of an answer that failed after its start."""
        ...


class Stream:
    """One connection that reads an unfinished answer; the attempt counts it as a reader until `close`."""

    def __init__(self, session: Session, attempt: Attempt, request: Request, dialect: Dialect) -> None:
        self._attempt, self._dialect = attempt, dialect
        self._reading = ExitStack()
        self._reading.enter_context(attempt.reading())
        self._visible = _visible_text(session, request)
        self._read = 0  # tokens
        self.answer: Turn | None = None  # once the last events were yielded

    def close(self) -> None:
        """Stop reading; without another reader an incomplete answer is aborted."""
        self._reading.close()

    async def begin(self) -> None:
        """Wait for the first token; raise the generation's errors before it."""
        if self._attempt.progress is None:
            await asyncio.wait([self._attempt.task])
        elif not self._attempt.progress.tokens:
            await self._wait()
        if self._attempt.task.done():
            self._attempt.result()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events as tokens arrive; all events after the end of the generation are one piece."""
        # an attempt without progress is streamed once it is complete
        yield self._dialect.start((self._attempt.progress or self._attempt.result()).prompt_tokens)
        while not self._attempt.task.done():
            if delta := self._next_text():
                yield self._dialect.text(delta)
            else:
                await self._wait()
        self.answer = self._attempt.answer
        yield self._end()

    def _end(self) -> bytes:
        try:
            turn = self._attempt.result()
        except asyncio.CancelledError:
            return self._dialect.fail(_OVER)
        except (RunError, Refused) as error:
            return self._dialect.fail(str(error))
        return self._dialect.finish(turn, self._visible.rest(turn.text))

    def _next_text(self) -> str:
        if (progress := self._attempt.progress) is None:
            return ""
        tokens = progress.tokens[self._read :]
        self._read += len(tokens)
        return self._visible.add(tokens)

    async def _wait(self) -> None:
        """Wait for further tokens or the end of the generation."""
        waiting: list[asyncio.Future[Any]] = [self._attempt.task]
        if self._attempt.progress is not None:
            waiting.append(self._attempt.progress.news)
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)


def _visible_text(session: Session, request: Request) -> VisibleText:
    """Return the text of an answer as in `Session`: with tools, the content ends at the first call."""
    tools = bool(request.context.tools)
    starts = session.call_starts if tools else ()
    hidden = starts is None
    ends = (*request.stop, *(starts or ()))
    return VisibleText(session.tokenizer, ends, special=tools, trimmed=tools, hidden=hidden)
