"""Streaming of answers to clients during generation."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any, Protocol

from areal_like.capabilities.agents.attempts import Attempt
from areal_like.capabilities.agents.refusal import Refused
from areal_like.capabilities.agents.session import Request, Session
from areal_like.capabilities.agents.turn import Turn
from areal_like.capabilities.agents.visible_text import VisibleText
from areal_like.errors import RunError

EVENT_STREAM = "text/event-stream"
_OVER = "the episode is over"


class Dialect(Protocol):
    """The events of one API; each method returns them as bytes."""

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

    def __init__(self, session: Session, attempt: Attempt[Turn], request: Request, dialect: Dialect) -> None:
        self._attempt, self._dialect = attempt, dialect
        self._reading = ExitStack()
        self._reading.enter_context(attempt.reading())
        self._visible = _visible_text(session, request)
        self._read = 0  # tokens
        self.has_ended = False  # the last events were yielded

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

    def note_delivery(self, is_sent: bool) -> None:
        """Record whether the client received the last events; one of several clients is enough."""
        if (turn := self._attempt.answer) is not None:
            turn.delivered = is_sent or bool(turn.delivered)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events as tokens arrive; all events after the end of the generation are one piece."""
        yield self._dialect.start(self._prompt_tokens)
        while not self._attempt.task.done():
            if delta := self._next_text():
                yield self._dialect.text(delta)
            else:
                await self._wait()
        self.has_ended = True
        yield self._end()

    def _end(self) -> bytes:
        try:
            turn = self._attempt.result()
        except asyncio.CancelledError:
            return self._dialect.fail(_OVER)
        except (RunError, Refused) as error:
            return self._dialect.fail(str(error))
        return self._dialect.finish(turn, self._visible.rest(turn.text))

    @property
    def _prompt_tokens(self) -> int:
        if (progress := self._attempt.progress) is not None:
            return progress.prompt_tokens
        turn = self._attempt.result()  # an attempt without progress is streamed once it is complete
        return len(turn.tokens) - len(turn.response.tokens)

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
