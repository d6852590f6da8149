"""Repeated requests of clients, and answers that no client has read.

A client marks a request as a repetition by the `Idempotency-Key` of an equal earlier one, or by a retry count
(`X-Stainless-Retry-Count`, which the clients of OpenAI and Anthropic send). A repetition gets the answer of the earlier
attempt, finished or not, unless that attempt was aborted because no client waited for it. Without either mark, an equal
request is another sample, but an answer that is known to be unread is returned first.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from areal_like.capabilities.agents.turn import Turn


@dataclass(frozen=True)
class Sending:
    """The repetition marks of a request: its key, and how often the client has sent it before."""

    key: str = ""
    retries: int = 0


ONCE = Sending()


@dataclass(frozen=True)
class Failed:
    """The error that an attempt ended with, without its frames.

    A task that raises keeps its error with its frames, which keep the attempt and its session: a cycle.
    """

    error: Exception


def sending(headers: Mapping[str, str]) -> Sending:
    """Return the marks of repetition in the headers of a request."""
    retries = headers.get("x-stainless-retry-count", "")
    return Sending(headers.get("idempotency-key", ""), int(retries) if retries.isdecimal() else 0)


class Progress:
    """The tokens so far of an answer, and the number of prompt tokens; created in the event loop that reads them."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.tokens: list[int] = []
        self._loop = asyncio.get_running_loop()
        self.news: asyncio.Future[None] = self._loop.create_future()  # is done when further tokens have arrived

    def add(self, tokens: Sequence[int]) -> None:
        """Add tokens; may be called from any thread, also after the last read."""
        with suppress(RuntimeError):  # the loop is closed: the endpoint has ended
            self._loop.call_soon_threadsafe(self._add, tokens)

    def _add(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        news, self.news = self.news, self._loop.create_future()
        if not news.done():
            news.set_result(None)


@dataclass(eq=False)
class Attempt:
    """A request and its possibly unfinished answer; `readers` connections wait for it, and the last to leave aborts it.

    `number` counts the attempts of a session. `progress` has the tokens so far, if they are streamed.
    """

    number: int
    request: object
    sent: Sending
    task: asyncio.Task[Turn | Failed]
    progress: Progress | None = None
    readers: int = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count as a reader while the body runs."""
        self.readers += 1
        try:
            yield
        finally:
            self.readers -= 1
            if not self.readers:
                self.task.cancel()

    async def turn(self) -> Turn:
        """Return the turn once it is complete; raises the generation's errors."""
        with self.reading():
            await asyncio.shield(self.task)
        return self.result()

    def result(self) -> Turn:
        """Return the turn of a complete attempt; raises the generation's errors."""
        found = self.task.result()
        if isinstance(found, Failed):
            raise copy(found.error)
        return found

    @property
    def answer(self) -> Turn | None:
        """The answer; None if it is missing or incomplete."""
        found = self.task.result() if self.task.done() and not self.task.cancelled() else None
        return None if isinstance(found, Failed) else found

    @property
    def is_unread(self) -> bool:
        """Whether the answer is known not to have reached a client."""
        return (turn := self.answer) is not None and turn.delivered is False

    @property
    def is_here(self) -> bool:
        """Whether the attempt belongs to the running event loop and has not failed."""
        return self.answer is not None or (not self.task.done() and self.task.get_loop() is asyncio.get_running_loop())


@dataclass(eq=False)
class Attempts:
    """The attempts of one session."""

    _all: list[Attempt] = field(default_factory=list)

    def begin(
        self, request: object, sent: Sending, answering: Coroutine[Any, Any, Turn], progress: Progress | None = None
    ) -> Attempt:
        """Start answering a request."""
        attempt = Attempt(len(self._all), request, sent, asyncio.ensure_future(_outcome(answering)), progress)
        attempt.task.add_done_callback(lambda _: answering.close())  # if it was aborted before its start
        self._all.append(attempt)
        return attempt

    def find_repeated(self, request: object, sent: Sending) -> Attempt | None:
        """Return the attempt whose answer a request gets, None if the request gets its own answer."""
        if not (sent.key or sent.retries or any(attempt.is_unread for attempt in self._all)):
            return None
        same = [attempt for attempt in reversed(self._all) if attempt.request == request]
        if sent.key:
            found = next((attempt for attempt in same if attempt.sent.key == sent.key), None)
        else:
            found = self._find_retried(same, sent.retries) if sent.retries else None
        if found is not None and found.is_here:
            return found
        return None if found else next((attempt for attempt in same if attempt.is_unread), None)

    def _find_retried(self, same: list[Attempt], retries: int) -> Attempt | None:
        """Return the attempt that a retry repeats; the n-th retry repeats each attempt at most once.

        Aborted attempts come first, then unread ones, then the latest one repeated by the retry before.
        """

        def rank(attempt: Attempt) -> tuple[bool, bool, int]:
            return not attempt.task.cancelled(), not attempt.is_unread, -attempt.sent.retries

        found = min((attempt for attempt in same if attempt.sent.retries < retries), key=rank, default=None)
        if found is not None:
            found.sent = Sending(found.sent.key, retries)
        return found

    def answer(self, number: int) -> Turn | None:
        """Return the answer of an attempt by its number; None if it is missing or incomplete."""
        return self._all[number].answer if number < len(self._all) else None

    def answers(self) -> list[tuple[object, Turn]]:
        """Return the answered requests with their answers, in order of arrival."""
        found = ((each.request, each.answer) for each in self._all)
        return [(request, turn) for request, turn in found if turn is not None]

    @property
    def aborted(self) -> int:
        """Number of requests that were aborted because no client waited for them."""
        return sum(attempt.task.cancelled() for attempt in self._all)

    def abort(self) -> None:
        """Abort unanswered requests, because the episode has ended. May be called from any thread."""
        for attempt in self._all:
            if not attempt.task.done() and not (loop := attempt.task.get_loop()).is_closed():
                loop.call_soon_threadsafe(attempt.task.cancel)


async def _outcome(answering: Coroutine[Any, Any, Turn]) -> Turn | Failed:
    try:
        return await answering
    except asyncio.CancelledError:
        pass
    except Exception as error:  # noqa: BLE001 - it is raised where the answer is read
        return Failed(error.with_traceback(None))
    raise asyncio.CancelledError  # a new one, without the frames
